import math
from dataclasses import replace

import pytest
import torch

from schemas.identity import FinalNorm
from service.capture.engine import WITNESS_TOKENS
from service.proof.gap_check import check_gaps
from service.proof.head import Head
from service.proof.head_weights import HeadWeights, NormWeights
from service.proof.logit_check import MOST_SIGMAS, LogitCase, Witness
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
    said = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        LogitCase(f"row {row}", states_NH[row], Witness.of(list(zip(*one, strict=True))))
        for row, one in enumerate(said)
    ]


def test_rows_that_are_what_the_engine_said_pass(head):
    verdict = check_gaps(head, cases(head, 150))
    assert verdict.faults == ()
    assert verdict.max_sigmas < 0.1


def test_gaps_are_differences_of_the_heads_own_logits(head):
    (case,) = cases(head, 1)
    logprobs = head.logprobs(case.state_H[None])[0]
    tokens = torch.tensor([[5, 9, 5]])
    gaps = head.gaps(case.state_H[None], tokens)
    assert gaps.gap[0].tolist() == pytest.approx([0, float(logprobs[5] - logprobs[9]), 0], abs=1e-4)
    opinion = head.opinion(case.state_H[None], torch.tensor([9]))
    own = head.gaps(case.state_H[None], torch.stack([opinion.own_token, torch.tensor([9])], dim=1))
    assert float(own.sigma[0, 1]) == pytest.approx(float(opinion.gap_sigma[0]), rel=1e-5)


def test_states_of_another_row_are_named_with_both_gaps(head):
    rows = cases(head, 70)
    rows[3], rows[66] = (
        replace(rows[3], state_H=rows[66].state_H),
        replace(rows[66], state_H=rows[3].state_H),
    )
    faults = check_gaps(head, rows).faults
    assert [fault.split(":")[0] for fault in faults] == ["row 3", "row 66"]
    assert all("by the stored states" in fault and "by the engine" in fault for fault in faults)


@pytest.mark.parametrize(("part", "found"), [(0.9, False), (1.1, True)])
def test_the_bound_is_what_rounding_explains(head, part, found):
    (case,) = cases(head, 1)
    tokens = [case.witness.next_token, *(token for token, _ in case.witness.others)]
    sigma = float(head.gaps(case.state_H[None], torch.tensor([tokens])).sigma[0, 1])
    (token, logprob), *rest = case.witness.others
    off = Witness(
        case.witness.next_token,
        case.witness.next_logprob,
        ((token, logprob + part * MOST_SIGMAS * sigma), *rest),
    )
    assert bool(check_gaps(head, [replace(case, witness=off)]).faults) is found


def test_rows_with_fewer_tokens_are_checked_beside_others(head):
    rows = cases(head, 3)
    rows[1] = replace(rows[1], witness=replace(rows[1].witness, others=rows[1].witness.others[:1]))
    assert check_gaps(head, rows).faults == ()


@pytest.mark.parametrize(
    "witness",
    [Witness(3, -0.5), Witness(3, -0.5, ((VOCAB_SIZE, -1.0),)), Witness(3, -0.5, ((4, -math.inf),))],
)
def test_a_witness_without_two_tokens_proves_nothing(head, witness):
    (case,) = cases(head, 1)
    (fault,) = check_gaps(head, [replace(case, witness=witness)]).faults
    assert fault == "row 0: the engine gave no two log-probabilities to prove it by"


def test_a_log_probability_of_nan_is_left_out_and_the_others_are_compared(head):
    (case,) = cases(head, 1)
    others = ((7, math.nan), *case.witness.others)
    assert check_gaps(head, [replace(case, witness=replace(case.witness, others=others))]).faults == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_kind_of_head_agrees_with_its_model(tmp_path, model_type, dtype):
    model = TinyModel(tmp_path, model_type, dtype)
    head = Head.load(tmp_path, dtype)
    draw = torch.Generator().manual_seed(4)
    rows = []
    for row in range(24):
        says = model.run(torch.randint(0, 512, (3 + row,), generator=draw).tolist())
        rows.append(LogitCase(f"row {row}", says.layers[max(says.layers)][-1], says.witness))
    verdict = check_gaps(head, rows)
    assert verdict.faults == ()
    assert verdict.max_sigmas < MOST_SIGMAS / 2
    moved = [replace(case, state_H=rows[place - 1].state_H) for place, case in enumerate(rows)]
    assert len(check_gaps(head, moved).faults) == len(rows)
