"""What all tests have in common: no test is judged by the machine's speed, and torch's math is settled."""

from hypothesis import HealthCheck, settings

from connector.vml import settle_vector_math

settings.register_profile("quarry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quarry")

# The models in transformers that captures are held against run in the tests' own process.
settle_vector_math()
