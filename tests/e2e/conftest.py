"""What the hazards' modules share; each brings an engine of its own as `bench`."""

from collections.abc import Iterator

import pytest

from tests.support.engine_bench import Bench
from tests.support.real_engine import free_blocks


@pytest.fixture
def no_block_is_lost(bench: Bench) -> Iterator[None]:
    """Begin with an empty prefix cache, and end with every block free."""
    bench.loop.call(free_blocks(bench))
    yield
    bench.loop.call(free_blocks(bench))
