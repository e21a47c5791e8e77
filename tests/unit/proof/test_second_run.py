"""What two runs of one row may differ by."""

import pytest
import torch

from schemas.dataset.manifest import LayerAgreement
from service.errors import StatesWrong
from service.proof.second_run import LayerBound, compare, layer_bound
from tests.support.plans import identity

HIDDEN = 64
BOUND = LayerBound(layer_id=2, cosine=0.99, misfits=0)


def states(tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def differing(first: torch.Tensor, places: slice) -> torch.Tensor:
    second = first.clone()
    second[places] = second[places].flip(1)
    return second


def bound_of(cosine: float, misfits: float = 0, **changes: str) -> LayerBound:
    of_canary = LayerAgreement(
        layer_id=2, cosine=cosine, max_rel_error=0.1, misfits=misfits, best_match_layer=2
    )
    return layer_bound(identity(**changes), of_canary)


def test_equal_states_agree_also_where_an_embedding_is_zero():
    first = states(300)
    first[7] = 0
    assert compare("row 0", BOUND, first, first.clone()) == pytest.approx(1.0)


def test_a_rounding_of_the_last_bit_agrees():
    first = states(300)
    second = (first.float() * (1 + 2.0**-8 * torch.randn(first.shape))).bfloat16()
    assert 0.999 < compare("row 0", BOUND, first, second) < 1


@pytest.mark.parametrize(
    ("tokens", "places"),
    [
        (130, slice(20, 36)),
        (129, slice(0, None, 16)),
        (257, slice(90, 106)),
        (1000, slice(600, 616)),
        (40, slice(3, 9)),
        (5, slice(2, 4)),
        (1, slice(0, 1)),
    ],
)
def test_a_block_of_other_states_is_refused_however_long_the_row_is(tokens, places):
    first = states(tokens)
    with pytest.raises(StatesWrong, match=r"^row 0: computed a second time, layer 2 has other states for"):
        compare("row 0", BOUND, first, differing(first, places))


def test_a_token_whose_router_flips_is_no_fault_of_a_short_row_or_a_long_one():
    for tokens in (5, 130, 1000):
        first = states(tokens)
        compare("row 0", BOUND, first, differing(first, slice(3, 4)))


@pytest.mark.parametrize(("prompt", "answer"), [(135, 7), (814, 12), (138, 2)])
def test_an_answer_of_other_states_is_refused_however_long_its_prompt_is(prompt, answer):
    first = states(prompt + answer)
    second = differing(first, slice(prompt, None))
    refused = rf"other states for {answer} of the {answer} tokens from {prompt + 1000} on"
    with pytest.raises(StatesWrong, match=refused):
        compare("row 0", BOUND, first, second, begin=1000, answer_begin=prompt + 1000)


def test_one_token_is_no_piece_of_its_own():
    """Its router may flip."""
    first = states(100)
    for place, begins in ((99, 99), (0, 1)):
        compare("row 0", BOUND, first, differing(first, slice(place, place + 1)), answer_begin=begins)


@pytest.mark.parametrize(("answer", "misfits", "most"), [(2, 0, 1), (2, 0.1, 1), (3, 0.1, 2), (4, 0.1, 3)])
def test_routers_may_flip_in_a_part_of_a_short_answer_and_its_length_is_that_of_the_rest(
    answer, misfits, most
):
    first = states(100 + answer)
    bound = LayerBound(2, 0.99, misfits)
    second = differing(first, slice(100, 100 + most))
    second[100 : 100 + most] *= 1.2
    compare("row 0", bound, first, second, answer_begin=100)
    with pytest.raises(StatesWrong, match=f"for {answer} of the {answer} tokens from 100 on"):
        compare("row 0", bound, first, differing(first, slice(100, None)), answer_begin=100)
    with pytest.raises(StatesWrong, match=f"as large .* in the {answer} tokens from 100 on"):
        compare("row 0", bound, torch.cat([first[:100], first[100:] * 1.1]), first, answer_begin=100)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_refused(wrong):
    first = states(130)
    second = first.clone()
    second[20:60] = wrong
    with pytest.raises(StatesWrong):
        compare("row 0", BOUND, first, second)


def test_states_of_another_length_are_refused():
    first = states(200)
    with pytest.raises(StatesWrong, match="50% off in length"):
        compare("row 0", BOUND, first, first * 2)
    with pytest.raises(StatesWrong, match=r"layer 2 is 1\.1 times as large .* in the 100 tokens from 100 on"):
        compare("row 0", BOUND, torch.cat([first[:100], first[100:] * 1.1]), first)


@pytest.mark.parametrize(("misfits", "most"), [(0.0, 8), (0.01, 16), (0.05, 35), (0.1, 52)])
def test_more_tokens_may_differ_where_the_canarys_own_did(misfits, most):
    bound = bound_of(1.0, misfits)
    first = states(129)
    compare("row 0", bound, first, differing(first, slice(0, most)))
    with pytest.raises(StatesWrong, match=f"other states for {most + 1} of the 129 tokens"):
        compare("row 0", bound, first, differing(first, slice(0, most + 1)))


def test_the_bound_is_the_dtypes_unless_the_canary_was_further_off():
    assert bound_of(1.0, dtype="float32").cosine == 0.99999
    assert bound_of(0.9, dtype="float32").cosine == pytest.approx(0.6)
    assert bound_of(1.0, dtype="float32", compression="fp8").cosine == 0.99
