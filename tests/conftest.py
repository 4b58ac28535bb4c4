"""What holds for every test: a slow machine is no failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Examples and their generation may take any time; pytest's own limit catches what hangs.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
