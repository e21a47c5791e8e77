"""A model of sliding and full attention, whose states lie in small blocks of their own, is captured right.

Its class is one that Quarry carries. Rows are copied as early as a device may copy them.
"""

from collections.abc import Iterator

import pytest

from schemas.generate import Generate
from tests.architectures.limits import FLOAT32_TOLERANCE
from tests.architectures.recipe import MAX_POSITION
from tests.architectures.recipes import RECIPES
from tests.architectures.target import make_target
from tests.support.engine_bench import Bench, by_row
from tests.support.plans import random_ids
from tests.support.real_engine import early_gather, meter, vllm_bench

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_block_is_lost")]

BLOCK = 32
"""Slots of a block of the target's attention; the states' own have fewer."""
OPTIONS = {
    "block_size": BLOCK,
    "max_num_batched_tokens": 3 * BLOCK,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 130,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("hybrid")
    target = make_target(folder / "gemma3_text", RECIPES["Gemma3ForCausalLM"])
    with (
        early_gather(),
        vllm_bench(
            folder / "data",
            target,
            layers=(0, 2, 4, 8),
            max_len=MAX_POSITION,
            engine_options=OPTIONS,
            pool_bytes=2**20,
        ) as bench,
    ):
        options = bench.engine.info.options
        assert options["route"] == "plugin"
        assert options["block_size"] < BLOCK
        bench.tolerance = FLOAT32_TOLERANCE
        yield bench


def test_chunks_and_prefix_hits_bring_their_states_along(bench):
    """1. A head of several chunks. 2. Rows that share any part of it. 3. Parts of it, around its blocks."""
    head = random_ids([400], vocab_size=bench.vocab_size, seed=1)[0]
    _, rows, _ = bench.capture([head])
    bench.assert_right(rows, {0: head})
    hits = meter("prefix_cache_hits")
    shared = range(5, len(head), 29)
    tails = random_ids([1, 2, 7, 16, 33, 97] * 3, vocab_size=bench.vocab_size, seed=2)
    parts = [head[: BLOCK * number + more] for number in (2, 3, 5, 9) for more in (-1, 0, 1)]
    for prompts in ([head[:n] + tail for n, tail in zip(shared, tails, strict=False)], parts):
        _, rows, _ = bench.capture(prompts)
        bench.assert_right(rows, by_row(prompts))
    assert meter("prefix_cache_hits") > hits


def test_preempted_answers_are_captured_right(bench):
    prompts = random_ids([60] * 12, vocab_size=bench.vocab_size, seed=3)
    preempted = meter("num_preemptions")
    _, rows, answers = bench.capture(prompts, generate=Generate(max_tokens=120))
    bench.assert_right(rows, by_row(prompts, answers))
    assert meter("num_preemptions") > preempted
