"""Forward passes that wait for each other before every decoder layer, so that weights are read once for all.

Imports torch: import it in the reference's own process.

Each pass is the model's own forward, unchanged, in a thread of its own; only one thread runs at a time. That
holds for any architecture, and gives each prompt the bits that it gets alone, which padding into one batch
would not.

Legend: T tokens, H hidden size, N decoder layers.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from threading import Semaphore
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from service.proof.canary import POST_NORM
from service.proof.reference_model import Skeleton
from service.proof.reference_weights import WeightStream

States = dict[int, torch.Tensor]


class _Ended(Exception):
    """Leaves a forward pass: after the final norm every state is there, and the output head is not needed."""


class _NoMixing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to compute with a tensor that is not in memory: of some operations torch makes noise then."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        given = [one.is_meta for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(given) and not all(given):
            raise ValueError(f"{func} is called with a weight that is not in memory")
        return func(*args, **(kwargs or {}))


class Lockstep:
    """Runs prompts through a skeleton, one stage after the other, with that stage's weights in memory."""

    def __init__(self, skeleton: Skeleton, weights: WeightStream) -> None:
        """Put hooks on the model."""
        self._skeleton, self._weights = skeleton, weights
        self._current: _Pass | None = None
        embeddings = skeleton.model.get_input_embeddings()
        self._first = next(name for name, one in skeleton.model.named_modules() if one is embeddings)
        layers = set(skeleton.layers)
        for part in weights.parts:
            if part not in layers and part != skeleton.final_norm:
                module = skeleton.model.get_submodule(part)
                module.register_forward_pre_hook(self._loading(part))
        for stage, name in enumerate(skeleton.stages):
            module = skeleton.model.get_submodule(name)
            module.register_forward_pre_hook(self._entering(stage, name), with_kwargs=True)
        module.register_forward_hook(self._end)

    def run(self, prompts: Sequence[Sequence[int]]) -> list[States]:
        """Return by prompt the states [T, H] of layers 0..N and POST_NORM. Raises what the model raises."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            passes = [_Pass(self._skeleton.model, ids, threads) for ids in prompts]
            try:
                # Some models look at the device of these weights before they use them.
                self._weights.load(self._first)
                for _ in range(len(self._skeleton.stages) + 1):
                    for self._current in passes:
                        self._current.step()
                    self._weights.drop()
            finally:
                for one in passes:
                    one.abandon()
        return [one.states for one in passes]

    def _loading(self, part: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: object) -> None:
            self._weights.load(part)

        return hook

    def _entering(self, stage: int, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            assert self._current is not None  # noqa: S101 - hooks only run inside `run`
            self._current.enter(stage, args[0] if args else kwargs["hidden_states"])
            self._weights.load(name)

        return hook

    def _end(self, module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        assert self._current is not None  # noqa: S101 - as above
        self._current.keep(POST_NORM, output)
        raise _Ended


class _Pass:
    """One prompt's forward pass, in a thread that moves only inside `step`."""

    def __init__(self, model: Any, ids: Sequence[int], threads: Executor) -> None:  # noqa: ANN401 - a transformers model
        self.states: States = {}
        self._model, self._ids = model, ids
        self._go, self._stands = Semaphore(0), Semaphore(0)
        self._abandoned = False
        self._end = threads.submit(self._run)
        self._end.add_done_callback(lambda _: self._stands.release())

    def step(self) -> None:
        """Let the pass run to the next stage, or to its end. Raises what it raised."""
        self._go.release()
        self._stands.acquire()
        if self._end.done():
            self._end.result()

    def abandon(self) -> None:
        """Let the thread end, wherever it stands."""
        self._abandoned = True
        self._go.release()

    def enter(self, stage: int, hidden: torch.Tensor) -> None:
        """Keep what goes into a stage, and wait there. Runs in the pass's own thread."""
        if stage != len(self.states):
            raise ValueError(f"decoder layer {stage} runs after {len(self.states)} others")
        self.keep(stage, hidden)
        self._stands.release()
        self._await()

    def keep(self, layer_id: int, hidden: torch.Tensor) -> None:
        """Copy a state [1, T, H]."""
        if hidden.ndim != 3 or tuple(hidden.shape[:2]) != (1, len(self._ids)) or hidden.is_meta:
            raise ValueError(f"the state of layer {layer_id} is {list(hidden.shape)} on {hidden.device}")
        self.states[layer_id] = hidden[0].clone()

    def _await(self) -> None:
        self._go.acquire()
        if self._abandoned:
            raise _Ended

    def _run(self) -> None:
        with suppress(_Ended), torch.inference_mode(), _NoMixing():  # type: ignore[no-untyped-call]
            self._await()
            self._model(torch.tensor([self._ids]), use_cache=False)
