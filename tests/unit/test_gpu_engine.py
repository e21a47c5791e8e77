"""What can be told of the GPU benchmark without a GPU: its prompts, and that its comparison can fail."""

import pytest
import torch

from benchmarks.gpu_engine.agreement import Agreement
from benchmarks.gpu_engine.cases import (
    BORDER_LENGTHS,
    CASES,
    COMMON,
    SHARED_PREFIX_TOKENS,
    prompt_units,
)

LAYER_IDS = (0, 2, 3)
NUM_LAYERS, NUM_TOKENS, HIDDEN_SIZE = 3, 5, 16


@pytest.fixture
def reference_NTH() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((NUM_LAYERS + 1, NUM_TOKENS, HIDDEN_SIZE), generator=generator)


def test_equal_states_agree_in_every_layer(reference_NTH: torch.Tensor) -> None:
    agreement = Agreement(LAYER_IDS)
    agreement.add(reference_NTH[list(LAYER_IDS)], reference_NTH, None)
    figures = agreement.figures()
    assert set(figures) == {"0", "2", "3"}
    for layer in figures.values():
        assert layer["relative_error_max"] == 0
        assert layer["rows_nearer_to_another_layer"] == 0
        assert layer["rows_bit_equal"] == 1


def test_the_layer_before_is_told_from_the_layer_asked_for(reference_NTH: torch.Tensor) -> None:
    agreement = Agreement(LAYER_IDS)
    agreement.add(reference_NTH[[0, 1, 3]], reference_NTH, None)
    figures = agreement.figures()
    assert figures["2"]["rows_nearer_to_another_layer"] == 1
    assert figures["2"]["relative_error_max"] > 0.5
    assert figures["3"]["rows_nearer_to_another_layer"] == 0


def test_the_prompts_cross_blocks_and_steps_and_come_again_with_tails_on_a_shared_prefix() -> None:
    first, second = prompt_units(CASES["llama-bfloat16"], vocab_size=100)
    assert set(BORDER_LENGTHS) <= {len(ids) for ids in first}
    step_tokens = COMMON["max_num_batched_tokens"]
    assert isinstance(step_tokens, int)
    assert max(map(len, first)) > 2 * step_tokens
    assert second[: len(first)] == first
    prefix = max(first, key=len)[:SHARED_PREFIX_TOKENS]
    assert all(ids[: len(prefix)] == prefix for ids in second[len(first) :])
