"""The canary's second look: a model that its own rounding takes far, held to how far that is.

In 16 bits some models are chaotic: a router or a recurrent state turns the last bit of one layer into another
state two layers on, in transformers as in any engine. A random Qwen3-Next of 8 layers is 0.16 from its own
float32 run at the median token, whoever runs it. So where a capture does not fit the reference in the job's
dtype, the reference runs in float32 too, and the capture may be as far from that as the first reference is.
Pure comparison; imports torch: import it lazily.

Legend: T tokens, H hidden size, J candidate layers.
"""

from collections.abc import Mapping, Sequence

import torch

from schemas.dataset.manifest import CanaryReport, LayerAgreement
from schemas.request import Dtype
from service.errors import StatesWrong
from service.proof.canary import CURE, distance_to, judge, looks_like

_FACTOR = 2.0
"""Two runs of the same noise differ in their quantiles; a wrong layer, row or norm is not noise at all."""
_ROUNDING: dict[Dtype, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_QUANTILES = (0.5, 0.8)
_LATER = 0.1
"""A quantile is held to a later one of the noise: which tokens it strikes is chance."""
_LONG = 100
"""Tokens from which on a prompt is held by itself, too."""


def judge_by_noise(
    captured: Sequence[Mapping[int, torch.Tensor]],
    rounded: Sequence[Mapping[int, torch.Tensor]],
    exact: Sequence[Mapping[int, torch.Tensor]],
    layer_ids: Sequence[int],
    num_layers: int,
    dtype: Dtype,
) -> CanaryReport:
    """Hold captured states to the exact ones, within the noise of the rounded ones; all by prompt, [T, H].

    Args:
        captured: the engine's, of `layer_ids`.
        rounded: the reference's in `dtype`, which is not float32: layers 0..N and POST_NORM.
        exact: the same in float32.
        layer_ids: the captured layers.
        num_layers: N.
        dtype: what engine and `rounded` ran in.

    Raises:
        StatesWrong: names the layer, and how far it is off.
    """
    if _fits(rounded, exact, layer_ids, num_layers, dtype):
        # Else a short stale block, which stays below the quantiles, would pass in any model.
        raise _wrong("in this model rounding explains nothing")
    layers = []
    for layer_id in layer_ids:
        seen = [distance_to(layer_id, got[layer_id], want) for got, want in zip(captured, exact, strict=True)]
        due = [distance_to(layer_id, got[layer_id], want) for got, want in zip(rounded, exact, strict=True)]
        own = seen[0].candidates.index(layer_id)
        median_J = torch.cat([distance.error_JT for distance in seen], dim=1).median(dim=1).values
        best = seen[0].candidates[int(median_J.nan_to_num(torch.inf).argmin())]
        if best != layer_id:
            raise _wrong(f"layer {layer_id} {looks_like(best, num_layers)}")
        error, noise = ([distance.error_JT[own] for distance in distances] for distances in (seen, due))
        _check(layer_id, torch.cat(error), torch.cat(noise), _ROUNDING[dtype])
        for error_T, noise_T in zip(error, noise, strict=True):
            if len(error_T) >= _LONG:
                _check(layer_id, error_T, noise_T, _ROUNDING[dtype])
        layers.append(
            LayerAgreement(
                layer_id=layer_id,
                cosine=min(float(distance.cosine_T.median()) for distance in seen),
                max_rel_error=max(float(error_T.max()) for error_T in error),
                best_match_layer=best,
                median_rel_error=float(torch.cat(error).median()),
                own_median_rel_error=float(torch.cat(noise).median()),
            )
        )
    tokens = sum(len(states[layer_ids[0]]) for states in captured)
    return CanaryReport(prompts=len(captured), tokens=tokens, layers=tuple(layers))


def _fits(
    rounded: Sequence[Mapping[int, torch.Tensor]],
    exact: Sequence[Mapping[int, torch.Tensor]],
    layer_ids: Sequence[int],
    num_layers: int,
    dtype: Dtype,
) -> bool:
    """Say whether the reference in the dtype would pass the first look against itself in float32."""
    try:
        judge(rounded, exact, layer_ids, num_layers, dtype)
    except StatesWrong:
        return False
    return True


def _check(layer_id: int, error_T: torch.Tensor, noise_T: torch.Tensor, rounding: float) -> None:
    for quantile in _QUANTILES:
        found = float(error_T.quantile(quantile))
        bound = _FACTOR * float(noise_T.quantile(quantile + _LATER)) + rounding
        if not found <= bound:
            raise _wrong(
                f"layer {layer_id} is {found:.2e} off the float32 reference in {1 - quantile:.0%} of "
                f"{len(error_T)} tokens, of which the dtype explains {bound:.2e}"
            )


def _wrong(what: str) -> StatesWrong:
    return StatesWrong(f"canary: {what}", field="layers", cure=CURE)
