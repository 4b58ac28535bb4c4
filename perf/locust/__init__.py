"""Load tests with Locust: ``python -m perf.locust`` (``make locust``)."""
