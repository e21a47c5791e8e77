import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from schemas.dataset.shard import LightRow, open_shard
from service.proof.row_proof import name_fault, prove_row
from service.proof.tally import JobTally
from tests.support.plans import identity, provenance, sample_id
from tests.support.shards import ShardRow, write_shard

LAYERS, NUM_TOKENS, HIDDEN_SIZE = (0, 2, 8), 33, 64


def faults(
    folder, layer_id: int, states_TH: torch.Tensor, compression: str = "none", dtype: str = "bfloat16"
) -> tuple[str, ...]:
    """Return what is wrong with a stored row whose states of one layer are `states_TH`."""
    draw = torch.Generator().manual_seed(1)
    drawn = {layer: torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=draw) for layer in LAYERS}
    states = {layer: values_TH.to(getattr(torch, dtype)) for layer, values_TH in drawn.items()}
    states[layer_id] = states_TH
    row = ShardRow("s", None, NUM_TOKENS, [1] * NUM_TOKENS, [1] * NUM_TOKENS, states)
    about = identity(
        layer_ids=LAYERS, hidden_size=HIDDEN_SIZE, num_layers=8, compression=compression, dtype=dtype
    )
    write_shard(folder / "shard.parquet", [row], provenance(about))
    with open_shard(folder / "shard.parquet") as shard:
        every = prove_row(shard, 0, vocab_size=None, watch=JobTally().layer).faults
    return tuple(fault for fault in every if fault.startswith("layer "))


def with_block(value: float, tokens: slice = slice(17, None), columns: slice = slice(None)) -> torch.Tensor:
    states_TH = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2)).bfloat16()
    states_TH[tokens, columns] = value
    return states_TH


@pytest.mark.parametrize("compression", ["none", "planes"])
@pytest.mark.parametrize("layer_id", [2, 8])
@pytest.mark.parametrize(
    ("states_TH", "what"),
    [
        (with_block(0.0), "all zero in 16 of 33 tokens, the first at 17"),
        (with_block(3.0), "constant in 16 of 33 tokens, the first at 17"),
        (with_block(math.nan), "not finite in 16 of 33 tokens, the first at 17"),
        (with_block(-math.inf, slice(4, 5), slice(5, 6)), "not finite in 1 of 33 tokens, the first at 4"),
    ],
)
def test_impossible_values_are_named(tmp_path, layer_id, states_TH, what, compression):
    assert faults(tmp_path, layer_id, states_TH, compression) == (f"layer {layer_id}: {what}",)


def test_zero_embeddings_of_a_padding_token_are_right(tmp_path):
    assert faults(tmp_path, 0, with_block(0.0)) == ()


def test_values_at_both_ends_of_float16_are_right(tmp_path):
    """Their difference is not finite in that dtype."""
    states_TH = with_block(40_000.0, columns=slice(0, 1)).half()
    states_TH[:, 1] = -40_000.0
    assert faults(tmp_path, 2, states_TH, dtype="float16") == ()


def light(prompt: int = 3) -> LightRow:
    ids, mask = np.array([5, 6, 7, 8], np.int32), np.array([0, 1, 1, 1], np.uint8)
    name = sample_id("a", ids[:prompt], mask[:prompt])
    return LightRow(name, "a", 4, prompt, 8, ids, mask, (1, 2))


@pytest.mark.parametrize("prompt", [1, 3, 4])
def test_a_row_is_what_its_name_says_whatever_was_generated_after_it(prompt):
    assert name_fault(light(prompt)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": np.array([5, 6, 9, 8], np.int32)},
        {"loss_mask": np.array([1, 1, 1, 1], np.uint8)},
        {"source_id": "b"},
        {"sample_id": "0" * 32},
        {"prompt_tokens": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_departs_from_the_name_is_told(change):
    assert "are those of sample" in str(name_fault(replace(light(), **change)))


def test_a_generated_token_is_not_in_the_name():
    assert name_fault(replace(light(), input_ids=np.array([5, 6, 7, 99], np.int32))) is None
