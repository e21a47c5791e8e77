"""The training inputs of each kind of drafter, made from a stored row. Pure functions.

The alignment is that of serving: after the target has computed position t, vLLM's proposers feed the drafter
token t + 1, the target's state at position t, and position t, and it predicts token t + 2. A view's row t is
that input. A row counts in the loss where a served drafter would run: token t + 1 is the target's own
(supervised), and so is the predicted token.

Every view is a dict of tensors:

- `input_ids` int64: the token that is fed beside the state.
- `hidden_states`: the target's state that is fed, in the stored dtype.
- `positions` int64: of step k in row t it is t + k.
- `labels` int64: the token to predict, IGNORED where the row does not know it.
- `loss_mask` uint8: 1 where the row counts: at step k of row t, tokens t + 1 and t + 2 + k are supervised.
- `target_hidden_states`: the post-norm state whose logits under the target's head predict `labels`.

Legend: T tokens, R = T - 1 rows, H hidden size, K draft steps, A auxiliary layers.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from service.reader.errors import ReaderError
from service.reader.row import About, Row

IGNORED = -100
"""A label that PyTorch's losses ignore."""

Tensors = dict[str, torch.Tensor]


class View(Protocol):
    """Makes a training view of a row. Several threads may call it at once."""

    def check(self, about: About) -> None:
        """Raise ReaderError if the dataset lacks a layer that the view needs."""

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""


class _OfLastLayer:
    """A view that needs only the last layer."""

    __slots__ = ()

    def check(self, about: About) -> None:
        """Raise ReaderError if the last layer is missing."""
        _check(self, about, ())


class _OfAuxiliaryLayers:
    """A view that needs the last layer and the auxiliary layers in `layers`, or at least one if None."""

    __slots__ = ()
    layers: tuple[int, ...] | None

    def check(self, about: About) -> None:
        """Raise ReaderError if one of the named layers or the last layer is missing."""
        if self.layers is None and not set(about.layer_ids) - {about.num_layers}:
            raise ReaderError(
                "the dataset holds no auxiliary layers, only the last one: extract some in 'layers'"
            )
        if self.layers is not None and not self.layers:
            raise ReaderError("'layers' names no layer: leave it out to take all auxiliary layers")
        _check(self, about, self.layers or ())


def _check(view: object, about: About, layers: tuple[int, ...]) -> None:
    num_steps = getattr(view, "num_steps", 1)
    if num_steps < 1:
        raise ReaderError(f"'num_steps' is {num_steps}: it must be at least 1")
    missing = sorted({*layers, about.num_layers} - set(about.layer_ids))
    if missing:
        raise ReaderError(
            f"the dataset holds layers {list(about.layer_ids)}; this view needs {missing} as well: "
            "extract them, or name others"
        )


@dataclass(frozen=True, slots=True)
class Eagle(_OfLastLayer):
    """EAGLE-1 and EAGLE-2: the state is the last layer's, post-norm. Tensors are [R] or [R, H].

    With vLLM's MiMo and Step-3.5 as targets they are fed the state before the final norm: use
    `Mtp(1, normed=False)`.
    """

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        fed, targets = _apart(row.last_normed())
        return _first_step(row) | {"hidden_states": fed, "target_hidden_states": targets}


@dataclass(frozen=True, slots=True)
class Eagle3(_OfAuxiliaryLayers):
    """EAGLE-3: states are auxiliary layers, concatenated in ascending order: `hidden_states` is [R, A * H].

    `layers` lists their ids; if None, all captured layers below the last are used.
    """

    layers: tuple[int, ...] | None = None

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        return _first_step(row) | {
            "hidden_states": row.auxiliary(self.layers)[:-1],
            "target_hidden_states": row.last_normed()[1:],
        }


@dataclass(frozen=True, slots=True)
class PEagle(_OfAuxiliaryLayers):
    """P-EAGLE: EAGLE-3's first step, and `num_steps` labels for each row, predicted in parallel.

    `positions`, `labels` and `loss_mask` are [K, R]. `input_ids` and `hidden_states` are those of the first
    step: at the others the drafter is fed its own mask token and mask state.
    """

    num_steps: int
    layers: tuple[int, ...] | None = None

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        return Eagle3(self.layers)(row) | _steps(row, self.num_steps) | {"input_ids": row.input_ids[1:]}


@dataclass(frozen=True, slots=True)
class Mtp(_OfLastLayer):
    """Multi-token prediction with `num_steps` steps, as in DeepSeek, Qwen and GLM.

    `input_ids`, `positions`, `labels` and `loss_mask` are [K, R]: step k is fed token t + 1 + k at position t
    + k and predicts t + 2 + k. `hidden_states` [R, H] is the first step's; later steps are fed the drafter's
    own. It is post-norm if `normed`; vLLM's MiMo and Step-3.5 pass on the state before the final norm, so
    theirs is not.
    """

    num_steps: int
    normed: bool = True

    def __call__(self, row: Row) -> Tensors:
        """Return the view of a row."""
        last_TH = row.last()
        fed, targets = _apart(row.normed(last_TH))
        return _steps(row, self.num_steps) | {
            "hidden_states": fed if self.normed else last_TH[:-1],
            "target_hidden_states": targets,
        }


@dataclass(frozen=True, slots=True)
class Step35Mtp(Mtp):
    """Step-3.5's MTP: `Mtp` without `normed`. Each step has its own layer in the drafter."""

    num_steps: int = 3
    normed: bool = field(default=False, init=False)


@dataclass(frozen=True, slots=True)
class DFlash(_OfAuxiliaryLayers):
    """DFlash: auxiliary layers as context, un-shifted; blocks are cut by the trainer.

    `input_ids`, `positions` and `loss_mask` are [T], `hidden_states` is [T, A * H] and `target_hidden_states`
    [T, H]: the row of token t. `labels` [T] are the next tokens. Position p of a block predicts
    `input_ids[p]`, whose target state is `target_hidden_states[p - 1]`; it counts if `loss_mask[p]` is 1.
    """

    layers: tuple[int, ...] | None = None

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


def _steps(row: Row, num_steps: int) -> Tensors:
    """Return ids, positions, labels and masks of every step: [K, R].

    Ids past the end are 0 and never count in the loss.
    """
    num_rows = row.num_tokens - 1
    ids_KR = torch.zeros((num_steps, num_rows), dtype=torch.int64)
    labels_KR = torch.full((num_steps, num_rows), IGNORED)
    mask_KR = torch.zeros((num_steps, num_rows), dtype=torch.uint8)
    for step in range(min(num_steps, num_rows)):
        known = num_rows - 1 - step
        ids_KR[step, : known + 1] = row.input_ids[1 + step :]
        labels_KR[step, :known] = row.input_ids[2 + step :]
        mask_KR[step, :known] = row.loss_mask[1 : 1 + known] & row.loss_mask[2 + step :]
    return {
        "input_ids": ids_KR,
        "positions": torch.arange(num_rows) + torch.arange(num_steps)[:, None],
        "labels": labels_KR,
        "loss_mask": mask_KR,
    }


def _apart(normed_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fed and the predicted states, [R, H] each; they share no memory, so noise may be added."""
    return normed_TH[:-1].clone(), normed_TH[1:]


def _first_step(row: Row) -> Tensors:
    """Return the first of `_steps`: [R] each."""
    return {name: steps_KR[0] for name, steps_KR in _steps(row, 1).items()}
