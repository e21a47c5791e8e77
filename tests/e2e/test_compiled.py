"""Compiled as on a GPU: every other engine test is eager, and a compiled graph could keep a state back."""

import pytest

from tests.support.engine_bench import by_row
from tests.support.plans import random_ids
from tests.support.real_engine import vllm_bench
from tests.support.tiny_model import random_target

LAYERS = (2, 4, 8)
MAX_LEN = 256


@pytest.mark.engine
def test_a_compiled_engine_captures_the_models_states(tmp_path):
    """Lengths around a block and a chunk, then a prefix that is cached."""
    target = random_target(tmp_path / "qwen3", dtype="float32", max_position=MAX_LEN)
    options = {
        "enforce_eager": False,
        "block_size": 32,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 160,
    }
    head, *alone = random_ids([150, 1, 31, 32, 33, 96, 97, MAX_LEN - 1], vocab_size=1500, seed=1)
    prompts = [*alone, head, head[:64], head]
    with vllm_bench(
        tmp_path / "data", target, layers=LAYERS, max_len=MAX_LEN, decode=False, engine_options=options
    ) as bench:
        assert not bench.engine.info.options["enforce_eager"]
        for _ in range(2):
            _, rows, _ = bench.capture(prompts)
            bench.assert_right(rows, by_row(prompts))
