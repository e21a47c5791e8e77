import math
from collections.abc import Callable

import pytest
import torch

from schemas.dataset.index import Witness
from schemas.identity import FinalNorm
from service.proof.head import Head
from service.proof.head_weights import HeadWeights, NormWeights
from service.proof.logit_check import LogitCase, LogitVerdict
from service.proof.next_token_check import check_next_tokens

VOCAB_SIZE, HIDDEN_SIZE = 200, 64


@pytest.fixture(scope="module")
def head() -> Head:
    draw = torch.Generator().manual_seed(2)
    norm = NormWeights(
        FinalNorm(kind="rmsnorm", eps=1e-6), torch.rand(HIDDEN_SIZE, generator=draw) + 0.5, None
    )
    weight_VH = 0.2 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=draw)
    return Head(norm, HeadWeights(weight_VH, None, 1.0, None), "bfloat16")


def verdict(head: Head, rows: int, sigmas_off: Callable[[int], float]) -> LogitVerdict:
    """Check rows whose witnesses are `sigmas_off(row)` sigmas from what the states say."""
    draw = torch.Generator().manual_seed(3)
    states_NH = torch.randn(rows, HIDDEN_SIZE, generator=draw).to(torch.bfloat16)
    tokens_N = head.logprobs(states_NH).argmax(dim=1)
    told = head.opinion(states_NH, tokens_N)
    cases = []
    for row in range(rows):
        off = sigmas_off(row) * float(told.sigma[row])
        witness = Witness(int(tokens_N[row]), float(told.logprob[row]) + off)
        cases.append(LogitCase(f"row {row}", states_NH[row], witness))
    return check_next_tokens(head, cases)


def test_rows_as_far_off_as_rounding_takes_them_pass(head):
    told = verdict(head, 200, lambda row: math.sqrt(2) * math.sin(row))
    assert told.faults == ()
    assert (told.rows, told.argmax_agree) == (200, 200)
    assert told.max_error > 0


def test_one_row_far_off_is_named(head):
    told = verdict(head, 200, lambda row: 9.0 if row == 150 else 0.0)
    assert len(told.faults) == 1
    assert told.faults[0].startswith("row 150: token ")


def test_one_row_somewhat_off_is_no_fault(head):
    assert verdict(head, 200, lambda row: 5.0 if row == 150 else 0.0).faults == ()


def test_many_rows_slightly_off_are_wrong_together(head):
    told = verdict(head, 200, lambda row: 2.0 + (row == 77))
    assert len(told.faults) == 1
    assert told.faults[0].startswith("row 77: the log-probabilities of 200 rows are off")
    assert "this row is off by 3.0 sigmas" in told.faults[0]


def test_no_rows_are_no_fault(head):
    assert check_next_tokens(head, []) == LogitVerdict(0, 0, 0.0, ())


def test_a_token_that_the_states_do_not_say_is_named(head):
    draw = torch.Generator().manual_seed(3)
    state_H = torch.randn(HIDDEN_SIZE, generator=draw).to(torch.bfloat16)
    logprobs_V = head.logprobs(state_H[None])[0]
    least = int(logprobs_V.argmin())
    for token, says in ((least, "the stored states say token"), (VOCAB_SIZE, "is outside the vocabulary")):
        case = LogitCase("row 0", state_H, Witness(token, float(logprobs_V[least])))
        assert says in check_next_tokens(head, [case]).faults[0]
    nan = LogitCase("row 0", state_H, Witness(least, math.nan))
    assert check_next_tokens(head, [nan]).faults == ("row 0: its log-probabilities are not finite",)
