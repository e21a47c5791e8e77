import pytest
import torch

from connector.rowcheck import RowChecker, StatesWrongError
from connector.sentinels import SENTINELS, Sentinels

B, L, S, H = 6, 3, 4, 16


def cache(dtype, axes=(0, 1, 2, 3)):
    """Return a [B, L, S, H] view of random states whose memory has its axes in another order."""
    memory = torch.randn([(B, L, S, H)[axis] for axis in axes]).to(dtype)
    return memory.permute([axes.index(axis) for axis in range(4)])


def row(states_BLSH, blocks, num_tokens):
    return torch.cat([states_BLSH[block] for block in blocks], dim=1)[:, :num_tokens].contiguous()


def check(states_LTH):
    checker = RowChecker(states_LTH.dtype)
    return checker.check(states_LTH, (0, 4, 8), checker.look(states_LTH))


@pytest.mark.parametrize("dtype", list(SENTINELS))
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_the_outer_elements_of_every_slot_of_the_named_blocks_are_marked_and_nothing_else(dtype, axes):
    states = cache(dtype, axes)
    before = states.clone()
    Sentinels(states).place([])
    assert torch.equal(states, before)
    Sentinels(states).place([4, 1])
    width = torch.int32 if dtype is torch.float32 else torch.int16
    assert (states[[1, 4]][..., [0, -1]].view(width) == SENTINELS[dtype]).all()
    assert torch.equal(states[[1, 4]][..., 1:-1], before[[1, 4]][..., 1:-1])
    assert torch.equal(states[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


@pytest.mark.parametrize("dtype", list(SENTINELS))
def test_a_row_with_a_token_that_was_never_stored_is_refused_by_its_place(dtype):
    states = cache(dtype)
    Sentinels(states).place([2, 3])
    states[2] = torch.randn(L, S, H).to(dtype)
    states[3, :, 1:] = torch.randn(L, S - 1, H).to(dtype)
    with pytest.raises(StatesWrongError, match="no state for 1 of 7 tokens, the first at 4"):
        check(row(states, (2, 3), 7))


@pytest.mark.parametrize("dtype", list(SENTINELS))
def test_marks_behind_the_end_of_a_row_and_values_as_large_are_no_fault(dtype):
    states = cache(dtype)
    Sentinels(states).place([2])
    states[2, :, :2, 1:] = torch.randn(L, 2, H - 1).to(dtype)
    assert len(check(row(states, (2,), 2))) == L


@pytest.mark.parametrize("dtype", list(SENTINELS))
def test_marks_are_finite_as_their_own_dtype_and_as_the_float32_of_recurrent_layers(dtype):
    """An attention layer that is given the block next weighs it with 0, and 0 times NaN is NaN."""
    states = cache(dtype)
    Sentinels(states).place(range(B))
    marks = states[..., 0].contiguous()
    assert all(bool((marks.view(kind) * 0 == 0).all()) for kind in (dtype, torch.float32))
