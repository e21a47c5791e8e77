"""Stored states held against the most likely tokens that the engine named."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from schemas.dataset.states import StoredState
from schemas.identity import FinalNorm
from service.capture.engine import WITNESS_TOKENS
from service.proof.head import Head
from service.proof.head_weights import HeadWeights, NormWeights
from service.proof.logit_check import MOST_SIGMAS, LogitCase, LogitVerdict, check_logits
from tests.support.reference_models import MODEL_TYPES, TinyModel

VOCAB_SIZE, HIDDEN_SIZE = 200, 64


@pytest.fixture(scope="module")
def head() -> Head:
    draw = torch.Generator().manual_seed(2)
    norm = NormWeights(
        FinalNorm(kind="rmsnorm", eps=1e-6), torch.rand(HIDDEN_SIZE, generator=draw) + 0.5, None
    )
    weight_VH = 0.2 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=draw)
    return Head(norm, HeadWeights(weight_VH, None, 1.0, None), "bfloat16")


def cases(head: Head, count: int) -> list[LogitCase]:
    """Return rows whose witnesses are what their states say."""
    draw = torch.Generator().manual_seed(3)
    states_NH = torch.randn(count, HIDDEN_SIZE, generator=draw).to(torch.bfloat16)
    best = head.logprobs(states_NH).topk(WITNESS_TOKENS)
    likely = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        LogitCase(f"row {row}", tuple(zip(*one, strict=True)), StoredState(states_NH[row], None))
        for row, one in enumerate(likely)
    ]


def all_off(head: Head, case: LogitCase, sigmas: float) -> LogitCase:
    """Return the case with every token but the first `sigmas` less likely than its states say."""
    tokens = torch.tensor([[token for token, _ in case.witness]])
    sigma_K = head.gaps(case.last.state_H[None], tokens).sigma[0].tolist()[1:]
    others = tuple(
        (token, lp - sigmas * sigma) for (token, lp), sigma in zip(case.witness[1:], sigma_K, strict=True)
    )
    return replace(case, witness=(case.witness[0], *others))


@pytest.fixture
def verdict(head) -> Callable[[Callable[[int], float]], LogitVerdict]:
    """Check 200 rows, each as many sigmas off as the function given says."""
    rows = list(enumerate(cases(head, 200)))
    return lambda sigmas: check_logits(head, [all_off(head, case, sigmas(n)) for n, case in rows])


def test_rows_as_far_off_as_rounding_takes_them_pass(verdict):
    right = verdict(lambda row: math.sqrt(2) * math.sin(row))
    assert (right.faults, right.rows, right.argmax_agree) == ((), 200, 200)
    assert right.max_error > 0


@pytest.mark.parametrize(("share", "is_fault"), [(0.9, False), (1.1, True)])
def test_one_row_may_be_as_far_off_as_rounding_explains(verdict, share, is_fault):
    faults = verdict(lambda row: share * MOST_SIGMAS if row == 7 else 0.0).faults
    assert [fault.split(":")[0] for fault in faults] == ["row 7"] * is_fault


def test_many_rows_slightly_off_are_wrong_together(verdict):
    (fault,) = verdict(lambda row: 2.0 + (row == 77)).faults
    assert fault.startswith("row 77: the log-probabilities of 200 rows are off")
    assert "this row is off by 3.0 sigmas" in fault


def test_no_rows_are_no_fault(head):
    assert check_logits(head, []) == LogitVerdict(0, 0, 0.0, ())


def test_states_of_another_row_are_named_with_both_gaps(head):
    rows = cases(head, 70)
    rows[3], rows[66] = (
        replace(rows[3], last=rows[66].last),
        replace(rows[66], last=rows[3].last),
    )
    faults = check_logits(head, rows).faults
    assert [fault.split(":")[0] for fault in faults] == ["row 3", "row 66"]
    assert all("by the stored states" in fault and "by the engine" in fault for fault in faults)


@pytest.mark.parametrize(
    "witness",
    [
        ((3, -0.5),),
        ((3, -0.5), (VOCAB_SIZE, -1.0)),
        ((3, -0.5), (4, -math.inf)),
        ((3, math.nan), (4, -1.0), (5, -2.0)),
        ((-1, -0.5), (4, -1.0), (5, -2.0)),
    ],
)
def test_a_witness_without_two_tokens_proves_nothing(head, witness):
    (case,) = cases(head, 1)
    (fault,) = check_logits(head, [replace(case, witness=witness)]).faults
    assert fault == "row 0: the engine gave fewer than two log-probabilities"


@pytest.mark.parametrize("change", [lambda others: ((7, math.nan), *others), lambda others: others[:1]])
def test_tokens_that_are_missing_or_not_a_number_are_left_out(head, change):
    rows = cases(head, 3)
    witness = rows[1].witness
    rows[1] = replace(rows[1], witness=(witness[0], *change(witness[1:])))
    assert check_logits(head, rows).faults == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_kind_of_head_agrees_with_its_model(tmp_path, model_type, dtype):
    model = TinyModel(tmp_path, model_type, dtype)
    head = Head.load(tmp_path, dtype)
    draw = torch.Generator().manual_seed(4)
    rows = []
    for row in range(24):
        says = model.run(torch.randint(0, 512, (3 + row,), generator=draw).tolist())
        last = StoredState(says.layers[max(says.layers)][-1], None)
        rows.append(LogitCase(f"row {row}", says.witness, last))
    verdict = check_logits(head, rows)
    assert verdict.faults == ()
    sigmas = [abs(reading.stored - reading.engine) / reading.sigma for reading in verdict.readings]
    assert max(sigmas) < MOST_SIGMAS / 2
    moved = [replace(case, last=rows[place - 1].last) for place, case in enumerate(rows)]
    assert len(check_logits(head, moved).faults) == len(rows)
