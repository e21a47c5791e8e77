"""The reference's own process: `python -m service.proof.reference_process` serves one order and exits.

A separate process, because vLLM's Transformers backend patches transformers in its process, and because
exiting reliably frees the memory. The order is JSON on standard input and the states are written to a
safetensors file; a refusal is the last line of standard error, as JSON, with `EXIT_REFUSED`.

The prompts run as one batch, padded at the end to equal length. A decoder's state depends only on preceding
tokens, so a prompt's states are the first ones of its row, and a prompt that begins another needs no row of
its own. The model's own forward runs unchanged; hooks read each layer's weights before it runs and drop them
afterwards, so that the files are read once, for any architecture in transformers.

Legend: B rows of the batch, T tokens of the longest prompt, H hidden size, N decoder layers.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils.logging import disable_progress_bar

from connector.vector_math import settle_vector_math
from service.errors import EngineRefused, UnknownModel
from service.proof.canary import POST_NORM
from service.proof.reference import EXIT_REFUSED
from service.proof.reference_model import Skeleton, build_skeleton
from service.proof.reference_weights import WeightStream

States = dict[int, torch.Tensor]


class _Finished(Exception):
    """Leaves the forward pass after the final norm: all states are known, and the head is not needed."""


class _NoMetaInputs(TorchDispatchMode):
    """Refuses operations that mix meta tensors with real ones: some torch operations would return noise."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        on_meta = [one.is_meta for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(on_meta) and not all(on_meta):
            raise ValueError(f"{func} is called with a weight that is not in memory")
        return func(*args, **(kwargs or {}))


class ReferencePass:
    """A skeleton with hooks that load its parts from `weights` and keep every layer's input."""

    def __init__(self, skeleton: Skeleton, weights: WeightStream) -> None:
        """Register the hooks on the model; one pass runs at a time."""
        self._model, self._weights = skeleton.model, weights
        self._states: list[States] = []
        self._kept: list[tuple[int, slice]] = []
        """By prompt: its row in the batch, and its tokens there."""
        self._batch_shape: tuple[int, ...] = ()
        embeddings = skeleton.model.get_input_embeddings()
        self._embeddings = next(name for name, one in skeleton.model.named_modules() if one is embeddings)
        for part in weights.parts:
            if part not in skeleton.stages:
                skeleton.model.get_submodule(part).register_forward_pre_hook(self._loading(part))
        for stage, name in enumerate(skeleton.stages):
            module = skeleton.model.get_submodule(name)
            module.register_forward_pre_hook(self._entering(stage, name), with_kwargs=True)
        skeleton.model.get_submodule(skeleton.final_norm).register_forward_hook(self._finish)

    def run(self, prompts: Sequence[Sequence[int]], last_tokens: int | None = None) -> list[States]:
        """Return each prompt's states [T, H] of layers 0..N and POST_NORM, or those of its last tokens.

        Raises what the model raises.
        """
        rows: list[list[int]] = []
        for ids in sorted(map(list, prompts), key=len, reverse=True):
            if not any(_begins(row, ids) for row in rows):
                rows.append(ids)
        batch_BT = torch.tensor([ids + rows[0][len(ids) :] for ids in rows])
        self._states, self._batch_shape = [{} for _ in prompts], tuple(batch_BT.shape)
        self._kept = []
        for prompt in prompts:
            row = next(row for row, whole in enumerate(rows) if _begins(whole, prompt))
            start = 0 if last_tokens is None else max(0, len(prompt) - last_tokens)
            self._kept.append((row, slice(start, len(prompt))))
        with suppress(_Finished), torch.inference_mode(), _NoMetaInputs():  # type: ignore[no-untyped-call]
            # Some models check the device of these weights before using them.
            self._weights.load(self._embeddings)
            self._model(batch_BT, use_cache=False)
        self._weights.drop()
        return self._states

    def _loading(self, part: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: object) -> None:
            self._weights.load(part)

        return hook

    def _entering(self, stage: int, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            if stage != len(self._states[0]):
                raise ValueError(f"decoder layer {stage} runs after {len(self._states[0])} others")
            self._keep(stage, args[0] if args else kwargs["hidden_states"])
            self._weights.drop()
            self._weights.load(name)

        return hook

    def _finish(self, module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        self._keep(POST_NORM, output)
        raise _Finished

    def _keep(self, layer_id: int, hidden: torch.Tensor) -> None:
        """Copy what is kept of a state [B, T, H], since a layer may overwrite its input."""
        if hidden.ndim != 3 or tuple(hidden.shape[:2]) != self._batch_shape or hidden.is_meta:
            raise ValueError(f"the state of layer {layer_id} is {list(hidden.shape)} on {hidden.device}")
        for states, (row, tokens) in zip(self._states, self._kept, strict=True):
            states[layer_id] = hidden[row, tokens].clone()


def _begins(row: Sequence[int], ids: Sequence[int]) -> bool:
    """Return whether a row begins with `ids`."""
    return list(row[: len(ids)]) == list(ids)


def serve(order: Mapping[str, Any]) -> None:
    """Run the model of an order and write its states.

    Raises:
        EngineRefused: there is no reference for this model.
        ValueError, OSError, RuntimeError: from transformers.
    """
    folder, prompts, dtype = Path(order["folder"]), order["prompts"], getattr(torch, order["dtype"])
    skeleton = build_skeleton(folder, dtype)
    weights = WeightStream(skeleton, folder, dtype)
    states = ReferencePass(skeleton, weights).run(prompts, order["last_tokens"])
    metadata = {
        "library": f"transformers {transformers.__version__}",
        "activation_bits": str(skeleton.quantization.activation_bits or 0),
    }
    named = {f"{prompt}/{layer}": state for prompt, one in enumerate(states) for layer, state in one.items()}
    save_file(named, order["out"], metadata=metadata)


def main() -> int:
    """Serve one order from standard input; return the exit status."""
    disable_progress_bar()
    settle_vector_math()
    try:
        serve(json.load(sys.stdin))
    except (EngineRefused, UnknownModel) as refusal:
        print(json.dumps({"detail": refusal.detail, "cure": refusal.cure}), file=sys.stderr)
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
