"""Known failures, as changes to what the engine's cache holds of a finished request before it is drained.

Nothing here knows which check should find what; `tests.drill.table` says that.

Legend: L captured layers, T tokens, H hidden size. Layer places are those of the capture: the first is an
auxiliary layer, the last is layer N.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from connector.sentinels import SENTINELS
from connector.wire import DrainJob, hash_ids
from service.proof.head import Head

AUX, LAST = 0, -1


@dataclass(frozen=True, slots=True)
class Scene:
    """A request whose states can be changed in place, and those drained before it, the newest last."""

    states_LTH: torch.Tensor
    slots: int
    earlier: Sequence[torch.Tensor]
    weights: Path

    @property
    def dtype(self) -> str:
        return str(self.states_LTH.dtype).removeprefix("torch.")

    def block(self, number: int) -> slice:
        return slice(number * self.slots, (number + 1) * self.slots)

    def stale(self) -> torch.Tensor:
        """Return the states of the newest request that was at least as long."""
        num_tokens = self.states_LTH.shape[1]
        return next(old[:, :num_tokens] for old in reversed(self.earlier) if old.shape[1] >= num_tokens)


def zero_block(scene: Scene) -> None:
    scene.states_LTH[AUX, scene.block(1)] = 0


def zero_states(scene: Scene) -> None:
    scene.states_LTH.zero_()


def zero_token(scene: Scene) -> None:
    scene.states_LTH[AUX, 5] = 0


def constant_token(scene: Scene) -> None:
    scene.states_LTH[AUX, 5] = 0.5


def constant_layer(scene: Scene) -> None:
    scene.states_LTH[LAST] = 0.5


def equal_layers(scene: Scene) -> None:
    scene.states_LTH[AUX] = scene.states_LTH[1]


def nan(scene: Scene) -> None:
    scene.states_LTH[AUX, 7, 3] = float("nan")


def infinity(scene: Scene) -> None:
    scene.states_LTH[LAST, 7, 3] = float("-inf")


def never_stored(scene: Scene) -> None:
    """The engine skipped the step that held the row's second block: what it marked is still there."""
    states = scene.states_LTH[:, scene.block(1)]
    states.copy_(scene.stale()[:, scene.block(1)])
    _mark(states)


def truncated(scene: Scene) -> None:
    """The engine stopped three tokens before the end."""
    _mark(scene.states_LTH[:, -3:])


def _mark(states_LTH: torch.Tensor) -> None:
    width = {2: torch.int16, 4: torch.int32}[states_LTH.element_size()]
    states_LTH.view(width)[..., [0, -1]] = SENTINELS[states_LTH.dtype]


def stale_block(scene: Scene) -> None:
    scene.states_LTH[:, scene.block(1)] = scene.stale()[:, scene.block(1)]


def stale_block_of_one_layer(scene: Scene) -> None:
    scene.states_LTH[AUX, scene.block(1)] = scene.stale()[AUX, scene.block(1)]


def stale_prefix(scene: Scene) -> None:
    """The prefix cache served a block that belongs to other tokens."""
    scene.states_LTH[:, scene.block(0)] = scene.stale()[:, scene.block(0)]


def stale_tail(scene: Scene) -> None:
    scene.states_LTH[:, scene.block(2)] = scene.stale()[:, scene.block(2)]


def block_of_another_place(scene: Scene) -> None:
    """Another row's first block where this row's second should be."""
    scene.states_LTH[:, scene.block(1)] = scene.stale()[:, scene.block(0)]


def another_row(scene: Scene) -> None:
    scene.states_LTH.copy_(scene.stale())


def repeated_block(scene: Scene) -> None:
    scene.states_LTH[:, scene.block(1)] = scene.states_LTH[:, scene.block(0)].clone()


def shifted(scene: Scene) -> None:
    """Each token has the next one's states; the last has the first one's, as the next row's would be."""
    scene.states_LTH.copy_(scene.states_LTH.roll(-1, dims=1))


def delayed(scene: Scene) -> None:
    """Each token of one layer has the one before's states."""
    scene.states_LTH[AUX, 1:] = scene.states_LTH[AUX, :-1].clone()


def exchanged_layers(scene: Scene) -> None:
    scene.states_LTH[[AUX, 1]] = scene.states_LTH[[1, AUX]]


def exchanged_in_long_rows(scene: Scene) -> None:
    """The same, from the 257th token on."""
    scene.states_LTH[[AUX, 1], 256:] = scene.states_LTH[[1, AUX], 256:]


def exchanged_with_last(scene: Scene) -> None:
    scene.states_LTH[[AUX, LAST]] = scene.states_LTH[[LAST, AUX]]


def post_norm(scene: Scene) -> None:
    head = Head.load(scene.weights, scene.dtype)
    scene.states_LTH[LAST] = head.normed_state(scene.states_LTH[LAST]).normed.to(scene.states_LTH.dtype)


def other_float(scene: Scene) -> None:
    """The bytes are those of the other 16-bit format."""
    other = torch.float16 if scene.states_LTH.dtype is torch.bfloat16 else torch.bfloat16
    scene.states_LTH.copy_(scene.states_LTH.to(other).view(scene.states_LTH.dtype))


def stretched_layer(scene: Scene) -> None:
    """One auxiliary layer is a tenth larger than the model's."""
    scene.states_LTH[AUX] *= 1.1


def permuted_in_one_layer(scene: Scene) -> None:
    """Each token of one auxiliary layer has the next one's states, the last the first one's."""
    scene.states_LTH[AUX] = scene.states_LTH[AUX].roll(-1, dims=0)


STATES: dict[str, Callable[[Scene], None]] = {
    plant.__name__.replace("_", "-"): plant
    for plant in (
        *(zero_block, zero_states, zero_token, constant_token, constant_layer, equal_layers, nan, infinity),
        *(never_stored, truncated, stale_block, stale_block_of_one_layer, stale_prefix, stale_tail),
        *(block_of_another_place, another_row, repeated_block, shifted, delayed),
        *(
            exchanged_layers,
            exchanged_in_long_rows,
            exchanged_with_last,
            post_norm,
            other_float,
            permuted_in_one_layer,
        ),
        stretched_layer,
    )
}


def lost(job: DrainJob) -> list[DrainJob]:
    return []


def twice(job: DrainJob) -> list[DrainJob]:
    return [job, replace(job, req_id=f"{job.req_id}-again")]


def fewer_tokens(job: DrainJob) -> list[DrainJob]:
    return [replace(job, num_tokens=job.num_tokens - 3)]


def other_token_ids(job: DrainJob) -> list[DrainJob]:
    return [replace(job, planned_hash=hash_ids([1, 2, 3]))]


JOBS: dict[str, Callable[[DrainJob], list[DrainJob]]] = {
    "row-lost": lost,
    "row-twice": twice,
    "fewer-tokens": fewer_tokens,
    "other-token-ids": other_token_ids,
}

EXCHANGED = "exchanged-rows"
"""Two rows of one length hold each other's states."""


def flipped_bit(states_LTH: torch.Tensor, before: torch.Tensor | None) -> None:
    states_LTH.view(torch.int16)[AUX, 9, 5] ^= 1


def overwritten(states_LTH: torch.Tensor, before: torch.Tensor | None) -> None:
    """The slab was given to the next row too early: the second half is no longer this row's."""
    assert before is not None
    half = states_LTH.shape[1] // 2
    states_LTH[:, half:] = before[:, half : states_LTH.shape[1]].flip(2)


SLABS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], None]] = {
    "flipped-bit-in-memory": flipped_bit,
    "overwritten-slab": overwritten,
}
