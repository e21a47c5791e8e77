"""Views of a row whose every value is known: what is fed, what is predicted, and where it counts."""

from typing import Any

import pytest
import torch

from schemas.dataset.norm import NormWeights
from schemas.identity import FinalNorm
from service.reader.errors import ReaderError
from service.reader.row import About, Row
from service.reader.views import IGNORED, DFlash, Eagle, Eagle3, Mtp, PEagle, Step35Mtp

HIDDEN = 4
IDS = [10, 11, 12, 13, 14, 15]
MASK = [0, 0, 1, 1, 1, 0]
TWICE = NormWeights(FinalNorm(kind="rmsnorm", eps=0.0), torch.full((HIDDEN,), 2.0), None)


def states(layer_id: int, num_tokens: int = len(IDS)) -> torch.Tensor:
    """Position t of layer k holds 100 * k + t in every element but the sign of the last."""
    values = torch.arange(1, num_tokens + 1, dtype=torch.float32)[:, None] + 100.0 * layer_id
    return values.expand(-1, HIDDEN) * torch.tensor([1.0, 1.0, 1.0, -1.0])


def row(num_tokens: int = len(IDS), **changes: Any) -> Row:
    fields = {
        "sample_id": "s",
        "source_id": None,
        "prompt_tokens": 2,
        "input_ids": torch.tensor(IDS[:num_tokens]),
        "loss_mask": torch.tensor(MASK[:num_tokens], dtype=torch.uint8),
        "layer_ids": (2, 4, 8),
        "num_layers": 8,
        "read": lambda layer_ids: torch.cat([states(k, num_tokens) for k in layer_ids], dim=-1),
        "norm": TWICE,
    }
    return Row(**fields | changes)


FED, POSITIONS = IDS[1:], [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6]]
LABELS = [[*IDS[2 + step :], *[IGNORED] * (1 + step)] for step in range(3)]
# Token t + 1 is fed and t + 2 predicted: 12 -> 13 and 13 -> 14. Before 12 no drafter runs; after 14 the
# answer is over.
COUNTED = [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
NORMED = TWICE(states(8))
SIDES = torch.cat([states(2), states(4)], dim=-1)


@pytest.mark.parametrize(
    ("view", "hidden_states", "numbers"),
    [
        (Eagle(), NORMED[:-1], (FED, POSITIONS[0], LABELS[0], COUNTED[0])),
        (Eagle3(), SIDES[:-1], (FED, POSITIONS[0], LABELS[0], COUNTED[0])),
        (
            Eagle3(layers=(8, 2)),
            torch.cat([states(2), states(8)], dim=-1)[:-1],
            (FED, POSITIONS[0], LABELS[0], COUNTED[0]),
        ),
        (PEagle(num_steps=3), SIDES[:-1], (FED, POSITIONS, LABELS, COUNTED)),
        (Mtp(num_steps=2), NORMED[:-1], ([FED, [*FED[1:], 0]], POSITIONS[:2], LABELS[:2], COUNTED[:2])),
        (
            Mtp(num_steps=1, normed=False),
            states(8)[:-1],
            ([FED], POSITIONS[:1], LABELS[:1], COUNTED[:1]),
        ),
        (
            Step35Mtp(),
            states(8)[:-1],
            ([FED, [*FED[1:], 0], [*FED[2:], 0, 0]], POSITIONS, LABELS, COUNTED),
        ),
    ],
)
def test_a_view_feeds_and_predicts_what_serving_does(view, hidden_states, numbers) -> None:
    made = view(row())
    names = ("input_ids", "positions", "labels", "loss_mask")
    assert tuple(made[name].tolist() for name in names) == numbers
    assert torch.equal(made["hidden_states"], hidden_states)
    assert torch.equal(made["target_hidden_states"], NORMED[1:])
    assert set(made) == {*names, "hidden_states", "target_hidden_states"}


@pytest.mark.parametrize(
    "view", [Eagle(), Eagle3(), PEagle(2), Mtp(2), Mtp(2, normed=False), Step35Mtp(), DFlash()]
)
def test_noise_on_what_is_fed_changes_nothing_else(view) -> None:
    made, noisy = view(row()), view(row())
    noisy["hidden_states"] += 1.0
    for name, tensor in made.items():
        assert torch.equal(noisy[name], tensor) == (name != "hidden_states")


def test_dflash_is_not_shifted() -> None:
    view = DFlash()(row())
    assert view["input_ids"].tolist() == IDS
    assert view["positions"].tolist() == list(range(len(IDS)))
    assert view["loss_mask"].tolist() == MASK
    assert view["labels"].tolist() == [*IDS[1:], IGNORED]
    assert torch.equal(view["hidden_states"], SIDES)
    assert torch.equal(view["target_hidden_states"], NORMED)


@pytest.mark.parametrize("view", [Eagle(), Eagle3(), PEagle(2), Mtp(2), Step35Mtp(2)])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_short_rows_give_short_views(view, num_tokens) -> None:
    made = view(row(num_tokens))
    assert made["hidden_states"].shape[0] == made["positions"].shape[-1] == num_tokens - 1
    assert made["labels"].shape[-1] == num_tokens - 1
    assert not made["loss_mask"].any()


@pytest.mark.parametrize(
    ("view", "layer_ids", "message"),
    [
        (Eagle(), (2, 4), r"holds layers \[2, 4\]; this view needs \[8\]"),
        (Eagle3(), (8,), "no auxiliary layers"),
        (Eagle3(layers=(3, 4)), (2, 4, 8), r"needs \[3\]"),
        (Eagle3(layers=()), (2, 4, 8), "names no layer"),
        (PEagle(0), (2, 8), "'num_steps' is 0"),
        (Mtp(0), (2, 8), "'num_steps' is 0"),
        (Mtp(1), (2, 4), r"needs \[8\]"),
        (DFlash(), (8,), "no auxiliary layers"),
    ],
)
def test_a_view_that_cannot_be_served_is_refused_with_the_cure(view, layer_ids, message) -> None:
    norm = FinalNorm(kind="rmsnorm", eps=1e-6)
    about = About("m", "r", None, 8, layer_ids, HIDDEN, "none", torch.bfloat16, norm)
    with pytest.raises(ReaderError, match=message):
        view.check(about)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["rmsnorm", "gemma_rmsnorm", "layernorm"])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_the_norm_of_parts_is_the_norm_of_the_whole(num_tokens, kind, dtype) -> None:
    draw = torch.Generator().manual_seed(num_tokens)
    weight_H, bias_H = torch.randn((2, 256), generator=draw).to(dtype)
    norm = NormWeights(FinalNorm(kind=kind, eps=1e-6), weight_H, bias_H if kind == "layernorm" else None)
    states_TH = (torch.randn((num_tokens, 256), generator=draw) * 30).to(dtype)
    expected, before = norm(states_TH), states_TH.clone()
    normed = row(norm=norm, read=lambda _layer_ids: states_TH.clone())
    assert torch.equal(normed.last_normed(), expected)
    assert torch.equal(normed.normed(states_TH), expected)
    assert torch.equal(states_TH, before)
    assert normed.normed(states_TH).dtype is dtype
