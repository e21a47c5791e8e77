"""What all tests have in common: no test is judged by the machine's speed, and torch's math is settled."""

import os

from hypothesis import HealthCheck, settings

from connector.vml import settle_vector_math

settings.register_profile("quarry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quarry")

# Tests run in a process a core: threads of torch would only wait for each other, in children too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The models in transformers that captures are held against run in the tests' own process.
settle_vector_math()
