"""A model's states by transformers the plain way: every weight loaded, one prompt after the other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from connector.vector_math import settle_vector_math
from service.proof.canary import POST_NORM
from service.proof.reference_model import Skeleton, build_skeleton
from service.proof.reference_process import ReferencePass
from service.proof.reference_weights import WeightStream

States = dict[int, torch.Tensor]


def whole_states(folder: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype) -> list[States]:
    """Return by prompt the states [T, H] of layers 0..N and POST_NORM, of the model in `folder`."""
    settle_vector_math()
    found = build_skeleton(folder, dtype)
    model = type(found.model).from_pretrained(
        folder, config=found.model.config, dtype=dtype, attn_implementation="eager"
    )
    return states_of(Skeleton(model.eval(), found.layers, found.final_norm), prompts)


def streamed_states(
    folder: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype, last_tokens: int | None = None
) -> list[States]:
    """Return the same by the reference's own pass, which holds one layer at a time."""
    skeleton = build_skeleton(folder, dtype)
    return ReferencePass(skeleton, WeightStream(skeleton, folder, dtype)).run(prompts, last_tokens)


def assert_same_bits(got: list[States], want: list[States]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        wrong = [layer_id for layer_id, states in one.items() if not torch.equal(states, other[layer_id])]
        assert wrong == []


def states_of(whole: Skeleton, prompts: Sequence[Sequence[int]]) -> list[States]:
    """Return the same of a model in memory."""
    found: list[States] = []
    for stage, name in enumerate(whole.stages):

        def enter(_: object, args: Sequence[Any], kwargs: dict[str, Any], stage: int = stage) -> None:
            found[-1][stage] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        whole.model.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)
    norm = whole.model.get_submodule(whole.final_norm)
    norm.register_forward_hook(lambda _, args, output: found[-1].update({POST_NORM: output[0].clone()}))
    for ids in prompts:
        found.append({})
        with torch.inference_mode():
            whole.model(torch.tensor([ids]), use_cache=False)
    return found
