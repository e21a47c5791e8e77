import numpy as np
import pytest
import torch

from connector.repeats import RepeatCheck
from connector.rowcheck import StatesWrongError
from tests.support.sums import token_sums

LAYERS = (2, 8)
HIDDEN = 64


def states(tokens: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(len(LAYERS), tokens, HIDDEN, generator=draw).to(torch.bfloat16)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def row(tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of a row's states, and its token ids."""
    return token_sums(states(tokens, seed)), np.arange(tokens, dtype=np.int32) + 1000 * seed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden_size", [64, 6, 3])
def test_a_sum_tells_every_single_bit_of_a_state(dtype, hidden_size):
    healthy = torch.randn(2, 3, hidden_size).to(dtype)
    before = token_sums(healthy)
    assert before.shape == (2, 3)
    flipped = healthy.clone()
    flipped.view(torch.uint8)[1, 2, -1] ^= 1
    after = token_sums(flipped)
    assert (before != after).tolist() == [[False] * 3, [False, False, True]]


def test_other_states_pass_and_so_do_the_same_states_of_the_same_tokens():
    seen = RepeatCheck(2, 4096)
    for seed in range(50):
        seen.check(*row(40, seed), LAYERS)
    sums, tokens = row(40, 1)
    seen.check(sums[:, :16], tokens[:16], LAYERS)


@pytest.mark.parametrize(
    ("layer", "begin", "source", "first"),
    [(0, 16, 16, "token 2016 at 16 has the state of token 1016"), (1, 35, 3, "token 2035 at 35 .* 1003")],
)
def test_a_block_of_an_earlier_row_is_named_by_its_first_token_wherever_it_lay(layer, begin, source, first):
    seen = RepeatCheck(2, 4096)
    old, old_tokens = row(40, 1)
    seen.check(old, old_tokens, LAYERS)
    sums, tokens = row(40, 2)
    sums[layer, begin : begin + 5] = old[layer, source : source + 5]
    with pytest.raises(StatesWrongError, match=rf"layer {LAYERS[layer]} holds .* at 5 of 40, .*: {first}"):
        seen.check(sums, tokens, LAYERS)


def test_a_state_twice_in_one_row_is_found_by_a_single_token():
    sums, tokens = row(40, 1)
    sums[1, 7] = sums[1, 6]
    with pytest.raises(StatesWrongError, match="layer 8 holds the states of other tokens at 1 of 40"):
        RepeatCheck(2, 4096).check(sums, tokens, LAYERS)


def test_one_pair_of_tokens_with_one_embedding_is_no_fault_between_rows():
    seen = RepeatCheck(2, 4096)
    sums, tokens = row(40, 1)
    seen.check(sums, tokens, LAYERS)
    twin = tokens.copy()
    twin[0] = 7
    seen.check(sums[:, :1], twin[:1], LAYERS)


def test_embeddings_may_repeat():
    sums, tokens = row(40, 1)
    sums[0, 1:] = sums[0, 0]
    RepeatCheck(2, 4096).check(sums, tokens, (0, 8))


def test_what_is_older_than_the_cache_holds_is_forgotten():
    seen = RepeatCheck(2, 64)
    old, old_tokens = row(40, 1)
    seen.check(old, old_tokens, LAYERS)
    for seed in range(100, 140):
        seen.check(*row(40, seed), LAYERS)
    seen.check(old, old_tokens + 500, LAYERS)


def test_a_row_of_one_token_is_remembered():
    seen = RepeatCheck(2, 64)
    sums, tokens = row(2, 1)
    seen.check(sums[:, :1], tokens[:1], LAYERS)
    seen.check(sums[:, 1:], tokens[1:], LAYERS)
    with pytest.raises(StatesWrongError, match="at 2 of 2"):
        seen.check(sums, ids(5, 6), LAYERS)
