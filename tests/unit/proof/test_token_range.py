"""Each token's smallest and largest value are those that torch finds; NaN is carried through."""

import pytest
import torch

from service.proof.token_range import token_range

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 4096), (2, 70_000)])
def test_they_are_torchs(dtype, shape):
    states_TH = torch.randn(shape, generator=torch.manual_seed(0)).to(dtype)
    low_T, high_T = token_range(states_TH)
    due_low_T, due_high_T = torch.aminmax(states_TH, dim=1)
    assert low_T.dtype == high_T.dtype == dtype
    assert torch.equal(low_T, due_low_T)
    assert torch.equal(high_T, due_high_T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_one_of_them(dtype, bad):
    states_TH = torch.randn((4, 64)).to(dtype)
    states_TH[2, 17] = bad
    low_T, high_T = token_range(states_TH)
    assert (~(high_T - low_T).isfinite()).tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_value_of_16_bits_and_many_of_32_are_in_order(dtype):
    """One row a value beside zero: it is the smallest or the largest by its sign."""
    width = {torch.float32: torch.int32}.get(dtype, torch.int16)
    info = torch.iinfo(width)
    bits = torch.arange(-(2**15), 2**15).to(torch.int64) * (2 ** (info.bits - 16))
    values = bits.to(width).view(dtype)
    values = values[values.isfinite()]
    low_T, high_T = token_range(torch.stack([values, torch.zeros_like(values)], dim=1))
    assert torch.equal(low_T, values.clamp(max=0))
    assert torch.equal(high_T, values.clamp(min=0))


def test_states_that_lie_apart_are_read_as_they_stand():
    states_TH = torch.randn((6, 32)).to(torch.bfloat16)[::2, ::2]
    assert torch.equal(torch.stack(token_range(states_TH)), torch.stack(torch.aminmax(states_TH, dim=1)))
