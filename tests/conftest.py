"""Property tests draw the same cases every time; a slow machine is not a failure."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ours", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ours")
