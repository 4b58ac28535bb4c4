"""Names of metrics and spans (``names``), logging set-up (``logging``), health types (``health``).

Imports nothing else of the package; everything may import it. Knows nothing of what requests say.
"""
