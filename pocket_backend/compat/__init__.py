"""Import names of the older API: ``pocketllm`` is an alias package (installed at the top level).

It holds no logic: every name resolves to one of this project.
"""
