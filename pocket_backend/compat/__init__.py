"""Import names of the older API: ``pocketllm``, ``pocketllm_cpp``, ``dsv4_cpp_core`` are packages
of this folder, installed at the top level.

They hold no logic: every name resolves to one of this project (docs/compat.md).
"""
