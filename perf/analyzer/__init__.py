"""NVIDIA's perf_analyzer over our server: ``python -m perf.analyzer`` (``make perf-analyzer``)."""
