import numpy as np
import pytest
import torch
import xxhash

from connector.rowcheck import (
    SCRATCH_ELEMENTS,
    NotFiniteError,
    RowChecker,
    StatesWrongError,
    as_float32,
    check_distinct,
)
from tests.support.sums import token_sums

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check_row(states, layer_ids):
    checker = RowChecker(states.dtype)
    return checker.check(states, layer_ids, checker.look(states))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [*((dtype, 1.0) for dtype in DTYPES), (torch.bfloat16, 1e-25), (torch.bfloat16, 1e30)],
)
def test_healthy_rows_pass_and_are_read_right(dtype, scale):
    """Also where squares are too small or too large for float32."""
    states = (scale * torch.randn(2, 5, 64)).to(dtype)
    for reading, layer in zip(check_row(states, (2, 8)), states.double(), strict=True):
        assert reading.mean_rms == pytest.approx(float(layer.pow(2).mean(1).sqrt().mean()), rel=1e-5)
        assert reading.max_abs == float(layer.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found(dtype, bad):
    states = torch.randn(2, 5, 64).to(dtype)
    states[1, 3, 17] = bad
    with pytest.raises(NotFiniteError, match="layer 8 is not finite in 1 of 5 tokens"):
        check_row(states, (2, 8))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ((1, 4), 0.0, "layer 8 is all zero in 1 of 5"),
        ((0,), 0.25, "layer 2 is constant in 5 of 5"),
    ],
)
def test_zero_and_constant_states_are_wrong_except_in_the_embeddings(part, value, message):
    states = torch.randn(2, 5, 64)
    states[part] = value
    with pytest.raises(StatesWrongError, match=message):
        check_row(states, (2, 8))
    layer_ids = (0, 8) if part[0] == 0 else (8, 0)
    assert len(check_row(states, layer_ids)) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_length_are_read_whole_one_after_the_other(dtype):
    checker = RowChecker(dtype)
    for num_tokens in (3, 2 * SCRATCH_ELEMENTS // 4096 + 1, 1):
        states = torch.randn(2, num_tokens, 4096).to(dtype)
        look = checker.look(states)
        assert np.array_equal(look.sums_LT, token_sums(states))
        assert np.array_equal(as_float32(look.largest_LT, dtype), states.abs().amax(2).float())
        raw = states.view(torch.uint8).numpy()
        assert look.checksums == tuple(xxhash.xxh3_64_intdigest(layer.tobytes()) for layer in raw)


def test_large_magnitudes_are_no_infinity():
    states = torch.full((1, 2, 8), 3e38, dtype=torch.bfloat16)
    states[0, :, 3] = -1e38
    assert check_row(states, (4,))[0].max_abs > 2e38


def test_two_equal_layers_are_wrong():
    with pytest.raises(StatesWrongError, match="layers 2 and 8"):
        check_distinct([5, 6, 5], (2, 4, 8))
