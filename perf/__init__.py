"""Benchmarks: run the modules with ``python -m perf.<name>``; see ``perf/README.md``."""
