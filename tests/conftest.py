"""What all tests have in common: Hypothesis judges no test by the speed of the machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("quarry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quarry")
