"""The canary: compares the captured states of a few prompts with a reference's, layer by layer. No I/O.

Imports torch: import it lazily. Unlike the logit check, it can detect an auxiliary layer that is off by one.

In 16 bits some models are chaotic: a router or a recurrent state amplifies the last bit of one layer to a
different state two layers later, in transformers as in any engine. The states of a random 8-layer Qwen3-Next
are 0.16 off its own float32 run at the median token, whatever runs it. So a capture that does not match the
reference in the job's dtype may be as far from a float32 reference as that 16-bit reference is.

Legend: T tokens, H hidden size, J candidate layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from schemas.dataset.manifest import LayerAgreement
from schemas.request import Dtype
from service.errors import EngineRefused, StatesWrong

POST_NORM = -1
"""The id, in a reference's states, of layer N after the final norm; no job captures it."""

CANARY_SKIP = 'set "canary": "skip" to run without it; the manifest records that'
"""The cure if there is no reference."""

MIN_COSINE: dict[Dtype, float] = {"bfloat16": 0.99, "float16": 0.999, "float32": 0.99999}
"""A correct capture differs by a few roundings per decoder layer: relative errors of 5e-2, 4e-3 and 4e-6 were
seen after 8 layers, and cosines of 0.9987, 0.99999 and 1. The rest is margin for depth and other kernels.
"""
_MIN_COSINE_8BIT = 0.95
"""The threshold if the engine rounds matmul inputs to 8 bits and the reference does not. An fp8 input is off
by 2.6e-2; relative errors of 3e-2 were seen in a trained 8-layer model and 0.22 in a random 22-layer one,
with cosines of 0.9993 and 0.975. The nearest layer of the reference still identifies the layer.
"""
_MIN_TOKENS = 0.9
"""Share of each prompt's tokens that must match: rounding alone flips an MoE router on a few."""
_FURTHER = 4.0
"""One less the cosine grows with the square of the distance: this allows twice the canary's distance."""
_CLOSER = 0.5
_NOISE_FACTOR = 2.0
"""Two runs with the same noise differ in their quantiles; a wrong layer, row or norm is far outside the
noise.
"""
_ROUNDING: dict[Dtype, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_SCALE_FACTOR = 3.0
"""Of what noise explains, by which the median length may be off; in 16 bits, 24 architectures took 0.14."""
_LEAST_SCALE = 0.005
"""A constant that one library rounds to 16 bits scales by up to 0.4%, as Gemma's factor of the embeddings."""
_QUANTILES = (0.5, 0.8)
_LATER = 0.1
"""A quantile is compared with a higher quantile of the noise, because the noise hits tokens at random."""
_LONG_PROMPT = 100
"""A prompt of at least this many tokens is also compared with the noise on its own."""
JUDGED_TOKENS = 129
"""A prompt's last tokens, which are compared: of the longest one, the first 129, as a shorter prompt, and the
last. More of them would take more memory in every layer, and a few wrong ones would be a smaller share.
"""
_LENGTHS = (1, 17, JUDGED_TOKENS)
_LONGEST = 1024 + JUDGED_TOKENS
"""All of the tokens of such a prompt that are compared are past a sliding window of 1,024."""
MOST_PROMPTS = len(_LENGTHS) + 2
_OWN_TAIL = 29
"""Tokens by which the last two prompts differ."""
_CURE = "this engine cannot be trusted with these layers of this model: choose others, or report it"

States = Sequence[Mapping[int, torch.Tensor]]
"""By prompt and layer id: [T, H] of its last `JUDGED_TOKENS` tokens."""


def no_reference(what: str, cure: str = CANARY_SKIP) -> EngineRefused:
    """Return the error for a canary that has no reference."""
    return EngineRefused(what, field="canary", cure=cure)


@dataclass(frozen=True, slots=True)
class _Distance:
    """The distance of one layer's states of one prompt from each layer of a reference.

    For each token: the cosine with the state of the same layer [T], its length relative to that one's [T],
    and the relative distance to it [T] and to each candidate [J, T].
    """

    candidates: tuple[int, ...]
    cosine_T: torch.Tensor
    length_T: torch.Tensor
    own_T: torch.Tensor
    error_JT: torch.Tensor


def canary_prompts(vocab_size: int, max_len: int) -> list[list[int]]:
    """Return prompts of 1 to `max_len` token ids, 1,153 at most; deterministic.

    Each is the beginning of the next, so that the reference has one row for them. The last differs from the
    one before it in its end, to hit the prefix cache. Ids are from the middle of the vocabulary, because
    special tokens, on which some models act, are at both ends.
    """
    draw = np.random.default_rng(20_260_101)
    low, high = vocab_size // 4, max(vocab_size // 4 + 1, 3 * vocab_size // 4)
    max_len = min(max_len, _LONGEST)
    ids: list[int] = draw.integers(low, high, max_len).tolist()
    prompts = [ids[:length] for length in _LENGTHS if length < max_len] + [ids]
    if max_len > 1:
        own = min(_OWN_TAIL, max_len // 2)
        prompts.append(ids[:-own] + draw.integers(low, high, own).tolist())
    return prompts


def judge(
    captured: States,
    reference: States,
    layer_ids: Sequence[int],
    num_layers: int,
    dtype: Dtype,
    activation_bits: int | None = None,
) -> tuple[LayerAgreement, ...]:
    """Check captured states against the reference's.

    The reference has every layer 0..N and POST_NORM; with `activation_bits`, the engine rounds more than the
    reference. Each captured layer must have the direction of its own reference and must not be clearly nearer
    to another layer. A token whose adjacent layers cannot be distinguished (a massive first token) does not
    count against it, but over all tokens its own layer must be the nearest. Lengths must agree, too: the
    final norm removes them, so that no logit shows them.

    Raises:
        StatesWrong: names the layer, the distance, and which layer it looks like.
    """
    layers = []
    min_cosine = MIN_COSINE[dtype] if activation_bits is None else _MIN_COSINE_8BIT
    for layer_id in layer_ids:
        distances = _distances(layer_id, captured, reference)
        for distance in distances:
            _check_prompt(layer_id, num_layers, distance, min_cosine)
        nearest, median = _nearest(distances)
        if nearest != layer_id:
            own = float(_own_errors(distances).median())
            looks = _looks_like(nearest, num_layers)
            raise _wrong(
                f"layer {layer_id} {looks}: median distance {own:.2e} to its own reference, "
                f"{median:.2e} to that layer"
            )
        _check_scale(layer_id, distances, most_scale(min_cosine))
        layers.append(_agreement(layer_id, distances, dtype))
    return tuple(layers)


def judge_by_noise(
    captured: States,
    rounded: States,
    exact: States,
    layer_ids: Sequence[int],
    num_layers: int,
    dtype: Dtype,
) -> tuple[LayerAgreement, ...]:
    """Check captured states against the exact ones, within the noise of the rounded ones.

    The report has their agreement with the rounded ones, which differ from them by two such noises, as two
    batches of the engine may.

    Args:
        captured: the engine's states of `layer_ids`.
        rounded: the reference's states in `dtype`, which is not float32: layers 0..N and POST_NORM.
        exact: the same in float32.
        layer_ids: the captured layers.
        num_layers: N.
        dtype: the dtype of the engine and of `rounded`.

    Raises:
        StatesWrong: names the layer, and how far it is off.
    """
    try:
        judge(rounded, exact, layer_ids, num_layers, dtype)
    except StatesWrong:
        pass  # the reference in the dtype is off, too
    else:
        # Otherwise a short stale block, which stays below the quantiles, would pass in any model.
        raise _wrong("rounding cannot explain the difference in this model")
    layers = []
    for layer_id in layer_ids:
        distances = _distances(layer_id, captured, exact)
        nearest, _ = _nearest(distances)
        if nearest != layer_id:
            raise _wrong(f"layer {layer_id} {_looks_like(nearest, num_layers)}")
        noise = _distances(layer_id, rounded, exact)
        error_T, noise_T = _own_errors(distances), _own_errors(noise)
        _check_noise(layer_id, error_T, noise_T, _ROUNDING[dtype])
        for of_prompt, noise_of_prompt in zip(distances, noise, strict=True):
            if len(of_prompt.own_T) >= _LONG_PROMPT:
                _check_noise(layer_id, of_prompt.own_T, noise_of_prompt.own_T, _ROUNDING[dtype])
        cosine = float(torch.cat([of_prompt.cosine_T for of_prompt in noise]).quantile(0.5 - _LATER))
        # Noise of `_NOISE_FACTOR` times the size takes its square from the cosine, and lengthens as much.
        _check_scale(layer_id, distances, max(_LEAST_SCALE, _NOISE_FACTOR**2 * (1 - cosine)))
        medians = {
            "median_rel_error": float(error_T.median()),
            "own_median_rel_error": float(noise_T.median()),
        }
        agreement = _agreement(layer_id, _distances(layer_id, captured, rounded), dtype)
        layers.append(agreement.model_copy(update=medians))
    return tuple(layers)


def second_run_bound(dtype: Dtype, cosine: float) -> float:
    """Return the least cosine of a token in a second run, in a layer whose `cosine` in the canary is given.

    It is that of the dtype, or less if the canary was further off: an engine that rounds its inputs to 8 bits
    may be further from the reference than the dtype explains. A token of the canary that is below it counts
    as a misfit, since as many of the second run's may be.
    """
    return min(MIN_COSINE[dtype], 1 - _FURTHER * (1 - cosine))


def most_stretch(min_cosine: float) -> float:
    """Return by what share a length may differ: noise that turns a state so much may stretch it as much."""
    return math.sqrt(2 * (1 - min_cosine))


def most_scale(min_cosine: float) -> float:
    """Return by what share the median length may differ: three times what noise of that cosine explains.

    Noise is nearly perpendicular to the state, and lengthens it by as much as it takes from the cosine.
    """
    return max(_LEAST_SCALE, _SCALE_FACTOR * (1 - min_cosine))


def _distances(layer_id: int, states: States, reference: States) -> list[_Distance]:
    return [_distance(layer_id, got[layer_id], want) for got, want in zip(states, reference, strict=True)]


def _distance(layer_id: int, got_TH: torch.Tensor, want: Mapping[int, torch.Tensor]) -> _Distance:
    """Measure [T, H] against a reference's layers, in float64: float32 cannot resolve cosines near 1."""
    own_TH = want[layer_id].double()
    if got_TH.shape != own_TH.shape:
        raise _wrong(f"layer {layer_id} has shape {list(got_TH.shape)}, the reference {list(own_TH.shape)}")
    got_TH = got_TH.double()
    candidates = tuple(sorted(want))
    size_T = torch.linalg.vector_norm(own_TH, dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    error_JT = torch.stack(
        [torch.linalg.vector_norm(got_TH - want[other].double(), dim=1) / size_T for other in candidates]
    )
    cosine_T = torch.cosine_similarity(got_TH, own_TH, dim=1)
    length_T = torch.linalg.vector_norm(got_TH, dim=1) / size_T
    return _Distance(candidates, cosine_T, length_T, error_JT[candidates.index(layer_id)], error_JT)


def _nearest(distances: Sequence[_Distance]) -> tuple[int, float]:
    """Return the layer with the smallest median distance over all prompts' tokens, and that distance."""
    median_J = torch.cat([distance.error_JT for distance in distances], dim=1).median(dim=1).values
    place = int(median_J.nan_to_num(torch.inf).argmin())
    return distances[0].candidates[place], float(median_J[place])


def _own_errors(distances: Sequence[_Distance]) -> torch.Tensor:
    return torch.cat([distance.own_T for distance in distances])


def _agreement(layer_id: int, distances: Sequence[_Distance], dtype: Dtype) -> LayerAgreement:
    """Return the report of a layer that is nearest to its own reference, with its distances to it."""
    cosine_T = torch.cat([distance.cosine_T for distance in distances])
    cosine = float(cosine_T.median())
    misfits_T = cosine_T < second_run_bound(dtype, cosine)
    return LayerAgreement(
        layer_id=layer_id,
        cosine=cosine,
        max_rel_error=float(_own_errors(distances).max()),
        misfits=float(misfits_T.double().mean()),
        best_match_layer=layer_id,
    )


def _check_prompt(layer_id: int, num_layers: int, distance: _Distance, min_cosine: float) -> None:
    nearer_T = distance.error_JT.amin(dim=0) < _CLOSER * distance.own_T
    fits_T = (distance.cosine_T >= min_cosine) & ~nearer_T
    share = float(fits_T.double().mean())
    stretched_T = (distance.length_T - 1).abs() > most_stretch(min_cosine)
    if share >= _MIN_TOKENS:
        if float(stretched_T.double().mean()) > 1 - _MIN_TOKENS:
            length = float(distance.length_T[stretched_T].median())
            raise _rescaled(layer_id, length)
        return
    misfits_JT = distance.error_JT[:, ~fits_T]
    nearest = distance.candidates[int(misfits_JT.median(dim=1).values.nan_to_num(torch.inf).argmin())]
    cosine = float(distance.cosine_T[~fits_T].median())
    looks = _looks_like(nearest, num_layers) if nearest != layer_id else "fits no layer of the model"
    if not bool(distance.own_T.isfinite().all()):
        looks = "is not finite"
    tokens = "1 token" if len(fits_T) == 1 else f"{len(fits_T)} tokens"
    raise _wrong(
        f"layer {layer_id} {looks}: {1 - share:.0%} of {tokens}, "
        f"median cosine {cosine:.4f}, expected at least {min_cosine}"
    )


def _check_scale(layer_id: int, distances: Sequence[_Distance], most: float) -> None:
    """Raise StatesWrong if the median length over all tokens is off by a share of more than `most`."""
    scale = float(torch.cat([distance.length_T for distance in distances]).median())
    if not abs(scale - 1) <= most:
        raise _rescaled(layer_id, scale)


def _check_noise(layer_id: int, error_T: torch.Tensor, noise_T: torch.Tensor, rounding: float) -> None:
    for quantile in _QUANTILES:
        error = float(error_T.quantile(quantile))
        bound = _NOISE_FACTOR * float(noise_T.quantile(quantile + _LATER)) + rounding
        if not error <= bound:
            raise _wrong(
                f"layer {layer_id} is {error:.2e} off the float32 reference in {1 - quantile:.0%} of "
                f"{len(error_T)} tokens, of which the dtype explains {bound:.2e}"
            )


def _looks_like(layer_id: int, num_layers: int) -> str:
    """Describe the layer of the reference that the states are nearest to."""
    if layer_id == POST_NORM:
        return f"looks like layer {num_layers} after the final norm"
    return f"looks like layer {layer_id}"


def _rescaled(layer_id: int, factor: float) -> StatesWrong:
    return _wrong(f"layer {layer_id} is {factor:.3g} times as large as in the model")


def _wrong(what: str) -> StatesWrong:
    return StatesWrong(f"canary: {what}", field="layers", cure=_CURE)
