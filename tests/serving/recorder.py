"""What the engine's proposers feed their drafters, written down where they do it: in the engine's worker.

Named as `worker_extension_cls`, its class becomes a base of the worker's. Nothing of a proposer is replaced:
its own methods run, and what goes into them and out of them is copied on the way.

Legend: B requests of a batch, T tokens of the target's pass, X width of the states handed over, H hidden
size.
"""

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[..., Any]


class Tap:
    """Copies of everything that one proposer was given and gave on, a dict for each call of `propose`.

    - `requests`: B names; `partial`: B flags, true where the prompt goes on in a later chunk.
    - `target_states` [T, X], `target_starts` [B + 1], `rejected` [B]: what the runner hands over; the last
      `rejected` rows of a request are of tokens that the target did not keep.
    - `starts` [B + 1], `samples` [B * n]: the requests' first rows in the drafter's pass, and the rows from
      which it drafts.
    - `context`: DFlash's states [T, H] and positions [T], which go into the cache and not through the model.
    - `calls`: for each draft step the keyword arguments of the drafter's forward; tensors and integers.
    """

    def __init__(self, runner: Any) -> None:
        self.passes: list[dict[str, Any]] = []
        self._runner, drafter = runner, runner.drafter
        self._around(drafter, "propose", self._before_propose)
        self._around(drafter, "set_inputs_first_pass", after=self._after_inputs)
        self._around(drafter.model, "forward", self._before_forward)
        if hasattr(drafter.model, "precompute_and_store_context_kv"):
            self._around(drafter.model, "precompute_and_store_context_kv", self._before_context)

    @staticmethod
    def _around(owner: Any, name: str, before: Call | None = None, after: Call | None = None) -> None:
        engines_own = getattr(owner, name)

        def tapped(*args: Any, **named: Any) -> Any:
            if before is not None:
                before(*args, **named)
            given = engines_own(*args, **named)
            if after is not None:
                after(given)
            return given

        setattr(owner, name, tapped)

    def _before_propose(self, *_: Any, **given: Any) -> None:
        names = list(self._runner.input_batch.req_ids)
        self.passes.append(
            {
                "requests": names,
                "partial": self._runner.discard_request_mask.np[: len(names)].tolist(),
                "target_states": given["target_hidden_states"].clone(),
                "target_starts": given["common_attn_metadata"].query_start_loc.clone(),
                "rejected": _or_zeros(given["num_rejected_tokens_gpu"], len(names)),
                "calls": [],
            }
        )

    def _after_inputs(self, given: tuple[int, torch.Tensor, Any]) -> None:
        _, samples, attention = given
        self.passes[-1] |= {"samples": samples.clone(), "starts": attention.query_start_loc.clone()}

    def _before_context(self, states: torch.Tensor, positions: torch.Tensor, *_: Any) -> None:
        self.passes[-1]["context"] = {"states": states.clone(), "positions": positions.clone()}

    def _before_forward(self, **given: Any) -> None:
        kept = {name: value for name, value in given.items() if isinstance(value, torch.Tensor | int)}
        self.passes[-1]["calls"].append(
            {name: value.clone() if torch.is_tensor(value) else value for name, value in kept.items()}
        )


def _or_zeros(rejected_B: torch.Tensor | None, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32) if rejected_B is None else rejected_B.clone()


class Recorder:
    """Becomes a base of the worker's class; called by `collective_rpc`."""

    model_runner: Any
    _tap: Tap

    def start_recording(self) -> str:
        """Tap the proposer and return the names of its class and of its drafter's."""
        self._tap = Tap(self.model_runner)
        drafter = self.model_runner.drafter
        return f"{type(drafter).__name__} {type(drafter.model).__name__}"

    def save_recording(self, path: str) -> None:
        """Write what was recorded, for `torch.load`."""
        torch.save(self._tap.passes, path)
