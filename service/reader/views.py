"""What each kind of drafter trains on, made from a stored row. Pure.

Serving decides the alignment: after the target has computed position t, vLLM's proposers feed the drafter
token t + 1, the target's state of position t and position t, and ask it for token t + 2. A view's row t is
that input. A row counts in the loss where a served drafter would run: token t + 1 was the target's own
(supervised), and so is the token that is predicted.

Every view is a dict of tensors:

- `input_ids` int64: the token that is fed beside the state.
- `hidden_states`: the target's state that is fed, in the stored dtype.
- `positions` int64: of step k in row t it is t + k.
- `labels` int64: the token to predict, IGNORED where the row does not know it.
- `loss_mask` uint8: 1 where the row counts.
- `target_hidden_states`: the post-norm state whose logits under the target's head predict `labels`.

Legend: T tokens, R = T - 1 rows, H hidden size, K draft steps, A auxiliary layers.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from service.reader.about import About
from service.reader.errors import ReaderError
from service.reader.row import Row

IGNORED = -100
"""A label that PyTorch's losses leave out."""

Tensors = dict[str, torch.Tensor]


class View(Protocol):
    """Makes a training view of a row. Several threads may call it at once."""

    def check(self, about: About) -> None:
        """Raise ReaderError if the dataset lacks a layer that the view needs."""

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""


@dataclass(frozen=True, slots=True)
class Eagle:
    """EAGLE-1 and EAGLE-2: the state is the last layer's, post-norm. All [R] or [R, H]."""

    def check(self, about: About) -> None:
        """Raise ReaderError without the last layer."""
        _need(about, (about.num_layers,))

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        normed_TH = row.last_normed()
        return _one_step(row) | {
            "hidden_states": normed_TH[:-1],
            "target_hidden_states": normed_TH[1:],
        }


@dataclass(frozen=True, slots=True)
class Eagle3:
    """EAGLE-3: the states are auxiliary layers side by side, ascending: `hidden_states` is [R, A * H].

    `layers` names their ids; all captured ones below the last if null.
    """

    layers: tuple[int, ...] | None = None

    def check(self, about: About) -> None:
        """Raise ReaderError without the layers named, or without the last one."""
        _need_auxiliary(about, self.layers)

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        return _one_step(row) | {
            "hidden_states": row.auxiliary(self.layers)[:-1],
            "target_hidden_states": row.last_normed()[1:],
        }


@dataclass(frozen=True, slots=True)
class PEagle:
    """P-EAGLE: EAGLE-3's first step, and `num_steps` labels for each row, predicted in parallel.

    `positions`, `labels` and `loss_mask` are [K, R]. `input_ids` and `hidden_states` are those of the first
    step: at the others the drafter is fed its own mask token and mask state.
    """

    num_steps: int
    layers: tuple[int, ...] | None = None

    def check(self, about: About) -> None:
        """Raise ReaderError without the layers named, or without the last one."""
        _need_steps(self.num_steps)
        _need_auxiliary(about, self.layers)

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        first = Eagle3(self.layers)(row)
        steps = [_labels(row, step) for step in range(self.num_steps)]
        return first | {
            "positions": _positions(row, self.num_steps),
            "labels": torch.stack([labels for labels, _ in steps]),
            "loss_mask": torch.stack([mask for _, mask in steps]),
        }


@dataclass(frozen=True, slots=True)
class Mtp:
    """Multi-token prediction of `num_steps` steps, as DeepSeek's, Qwen's and GLM's.

    `input_ids`, `positions`, `labels` and `loss_mask` are [K, R]: step k is fed token t + 1 + k at position
    t + k and predicts t + 2 + k. `hidden_states` [R, H] is the first step's; later steps are fed the
    drafter's own. It is post-norm if `normed`; vLLM's MiMo and Step-3.5 hand over the state before the final
    norm, so theirs is not.
    """

    num_steps: int
    normed: bool = True

    def check(self, about: About) -> None:
        """Raise ReaderError without the last layer."""
        _need_steps(self.num_steps)
        _need(about, (about.num_layers,))

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        last_TH = row.last()
        normed_TH = row.normed(last_TH)
        return _steps(row, self.num_steps) | {
            "hidden_states": (normed_TH if self.normed else last_TH)[:-1],
            "target_hidden_states": normed_TH[1:],
        }


@dataclass(frozen=True, slots=True)
class Step35Mtp:
    """Step-3.5's MTP: `Mtp` that is not `normed`. Each step has a layer of the drafter for itself."""

    num_steps: int = 3

    def check(self, about: About) -> None:
        """Raise ReaderError without the last layer."""
        Mtp(self.num_steps, normed=False).check(about)

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        return Mtp(self.num_steps, normed=False)(row)


@dataclass(frozen=True, slots=True)
class DFlash:
    """DFlash: auxiliary layers as context, un-shifted; blocks are cut by the trainer.

    `input_ids`, `positions` and `loss_mask` are [T], `hidden_states` is [T, A * H] and
    `target_hidden_states` [T, H]: the row of token t.
    """

    layers: tuple[int, ...] | None = None

    def check(self, about: About) -> None:
        """Raise ReaderError without the layers named, or without the last one."""
        _need_auxiliary(about, self.layers)

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        return {
            "input_ids": row.input_ids,
            "positions": torch.arange(row.num_tokens),
            "labels": torch.cat([row.input_ids[1:], torch.tensor([IGNORED])]),
            "loss_mask": row.loss_mask,
            "hidden_states": row.auxiliary(self.layers),
            "target_hidden_states": row.last_normed(),
        }


def _one_step(row: Row) -> Tensors:
    labels, mask = _labels(row, 0)
    return {
        "input_ids": row.input_ids[1:],
        "positions": torch.arange(row.num_tokens - 1),
        "labels": labels,
        "loss_mask": mask,
    }


def _steps(row: Row, num_steps: int) -> Tensors:
    """Return ids, positions, labels and masks of every step: [K, R].

    Ids past the end are 0 and never count.
    """
    ids_KR = torch.zeros((num_steps, row.num_tokens - 1), dtype=torch.int64)
    for step in range(min(num_steps, row.num_tokens - 1)):
        ids_KR[step, : row.num_tokens - 1 - step] = row.input_ids[1 + step :]
    steps = [_labels(row, step) for step in range(num_steps)]
    return {
        "input_ids": ids_KR,
        "positions": _positions(row, num_steps),
        "labels": torch.stack([labels for labels, _ in steps]),
        "loss_mask": torch.stack([mask for _, mask in steps]),
    }


def _positions(row: Row, num_steps: int) -> torch.Tensor:
    """Return t + k of every step: [K, R]."""
    return torch.arange(row.num_tokens - 1) + torch.arange(num_steps)[:, None]


def _labels(row: Row, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens t + 2 + `step` and where they count: both [R]."""
    labels = torch.full((row.num_tokens - 1,), IGNORED)
    mask = torch.zeros(row.num_tokens - 1, dtype=torch.uint8)
    known = row.num_tokens - 2 - step
    if known > 0:
        labels[:known] = row.input_ids[2 + step :]
        mask[:known] = row.loss_mask[1 : 1 + known] & row.loss_mask[2 + step :]
    return labels, mask


def _need(about: About, layer_ids: tuple[int, ...]) -> None:
    missing = sorted(set(layer_ids) - set(about.layer_ids))
    if missing:
        raise ReaderError(
            f"the dataset holds layers {list(about.layer_ids)}; this view needs {missing} as well: "
            "extract them, or name others"
        )


def _need_auxiliary(about: About, layers: tuple[int, ...] | None) -> None:
    if layers is None and not set(about.layer_ids) - {about.num_layers}:
        raise ReaderError(
            "the dataset holds no auxiliary layers, only the last one: extract some in 'layers'"
        )
    if layers is not None and not layers:
        raise ReaderError("'layers' names no layer: leave it out to take all auxiliary layers")
    _need(about, (*(layers or ()), about.num_layers))


def _need_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ReaderError(f"'num_steps' is {num_steps}: it must be at least 1")
