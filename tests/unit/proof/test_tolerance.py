"""What storing in fp8 may have done to logits: enough that healthy rows pass, and no more than that."""

import math
from dataclasses import replace

import pytest
import torch

from schemas.dataset.codecs.fp8 import Quantizer, dequantize, half_steps
from schemas.dataset.states import StoredState
from schemas.identity import FinalNorm
from service.capture.engine import WITNESS_TOKENS
from service.proof.head import Head
from service.proof.head_weights import HeadWeights, NormWeights
from service.proof.logit_check import LogitCase, check_logits
from service.proof.tolerance import Tolerance

VOCAB_SIZE, HIDDEN_SIZE, NUM_ROWS = 500, 256, 400


def head_of(kind: str, dtype: str, soft_cap: float | None = None) -> Head:
    draw = torch.Generator().manual_seed(2)
    bias_H = 0.1 * torch.randn(HIDDEN_SIZE, generator=draw) if kind == "layernorm" else None
    norm = NormWeights(FinalNorm(kind=kind, eps=1e-6), torch.rand(HIDDEN_SIZE, generator=draw) + 0.5, bias_H)
    weight_VH = 0.2 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=draw)
    return Head(norm, HeadWeights(weight_VH, None, 1.0, soft_cap), dtype)


def captured(shape: str, head: Head) -> torch.Tensor:
    """Return states [N, H]: like noise, with massive activations, or so that the next token is certain."""
    draw = torch.Generator().manual_seed(3)
    states_NH = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=draw)
    if shape == "massive":
        states_NH[:, 7] = 400.0
        states_NH[:, 100] = -90.0 * torch.rand(NUM_ROWS, generator=draw)
    if shape == "drowned":
        states_NH[:, 7] = 3e5
    if shape == "certain":
        tokens_N = torch.randint(0, VOCAB_SIZE, (NUM_ROWS,), generator=draw)
        states_NH += 8 * head._head.weight_VH[tokens_N].float()
    return states_NH.to(head.dtype)


def cases(head: Head, states_NH: torch.Tensor) -> list[LogitCase]:
    """Return rows whose witnesses are what the captured states say, and whose states are the stored ones."""
    best = head.logprobs(states_NH).topk(WITNESS_TOKENS)
    codes_NH = torch.empty(states_NH.shape, dtype=torch.uint8)
    scales_N = Quantizer(HIDDEN_SIZE).quantize(states_NH, states_NH.abs().amax(1).float(), codes_NH)
    stored_NH = dequantize(codes_NH, scales_N, states_NH.dtype)
    return [
        LogitCase(
            f"row {row}",
            tuple(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)),
            StoredState(stored_NH[row], half_steps(codes_NH[row], float(scales_N[row]))),
        )
        for row in range(NUM_ROWS)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", ["noise", "massive", "drowned", "certain"])
@pytest.mark.parametrize(
    ("kind", "soft_cap"), [("rmsnorm", None), ("gemma_rmsnorm", 30.0), ("layernorm", None)]
)
def test_healthy_rows_pass_alone_and_together(kind, soft_cap, shape, dtype):
    head = head_of(kind, dtype, soft_cap)
    rows = cases(head, captured(shape, head))
    verdict = check_logits(head, rows)
    assert verdict.faults == ()
    # A bound that is far above what happens would see nothing. Massive activations leave the rest to the
    # dtype's own rounding in the engine, which these witnesses have not been through.
    if shape == "noise":
        assert 0.7 < math.sqrt(sum(one.mean_square for one in verdict.readings) / NUM_ROWS) < 1.1


def test_the_same_states_are_wrong_where_nothing_was_rounded():
    head = head_of("rmsnorm", "bfloat16")
    rows = [
        replace(case, last=replace(case.last, half_H=None)) for case in cases(head, captured("noise", head))
    ]
    assert check_logits(head, rows).faults != ()


@pytest.mark.parametrize("shape", ["noise", "certain"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_states_of_another_row_are_found(kind, shape):
    head = head_of(kind, "bfloat16")
    rows = cases(head, captured(shape, head))
    moved = [replace(case, last=rows[place - 1].last) for place, case in enumerate(rows)]
    assert len(check_logits(head, moved).faults) == NUM_ROWS


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_products_slope_is_what_the_norm_does(kind):
    """The gradient that torch finds of the normed state's product, times the half steps."""
    head = head_of(kind, "float32")
    draw = torch.Generator().manual_seed(5)
    row_H = torch.randn(HIDDEN_SIZE, generator=draw)
    half_H = torch.rand(HIDDEN_SIZE, generator=draw)
    direction_H = torch.randn(HIDDEN_SIZE, generator=draw)
    x_H = row_H.clone().requires_grad_()
    state = head.normed_state(x_H)
    (state.unit * head.norm.weight_H.float() * direction_H).sum().backward()
    expected = float((x_H.grad * half_H).square().sum() / 3)
    exact = Tolerance(head.normed_state(row_H, half_H), 0.0, 1)
    assert float(exact.of_product(direction_H)) == pytest.approx(expected, rel=1e-4)
