"""The canary: a few prompts whose captured states must be the reference's, layer by layer. Pure comparison.

Imports torch: import it lazily. The logit check cannot see an auxiliary layer that is off by one; this can.

Legend: T tokens, H hidden size, J candidate layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from schemas.dataset.manifest import CanaryReport, LayerAgreement
from schemas.digest import canonical_sha256
from schemas.identity import Identity, Provenance
from schemas.request import Dtype
from service.errors import StatesWrong

POST_NORM = -1
"""Stands for layer N after the final norm among a reference's layers; it is never right to capture."""

CANARY_SKIP = 'say "canary": "skip" to go without it; the manifest will record that'
"""The cure where there is nothing to hold the states against."""

_MIN_COSINE: dict[Dtype, float] = {"bfloat16": 0.99, "float16": 0.999, "float32": 0.99999}
"""A right capture is a few roundings per decoder layer away: relative errors of 5e-2, 4e-3 and 4e-6 were seen
after 8 layers, cosines of 0.9987, 0.99999 and 1. The rest is room for depth and for other kernels."""
_MIN_COSINE_8BIT = 0.95
"""Where the engine rounds the inputs of its products to 8 bits and the reference does not. An fp8 input is
2.6e-2 off; relative errors of 3e-2 were seen in a trained model of 8 layers and 0.22 in a random one of 22,
cosines of 0.9993 and 0.975. Which layer it is, is still decided by the nearest one of the reference."""
_MIN_TOKENS = 0.9
"""Share of each prompt's tokens that must fit: rounding alone flips a mixture of experts' router on a few."""
_CLOSER = 0.5
_LENGTHS = (1, 17, 129)
_SHARED_PREFIX = 100
CURE = "this engine cannot be trusted with these layers of this model: choose others, or report it"


@dataclass(frozen=True, slots=True)
class Distance:
    """One prompt, one layer: cosine to its reference [T], relative distance to each candidate [J, T]."""

    candidates: tuple[int, ...]
    cosine_T: torch.Tensor
    error_JT: torch.Tensor


def canary_key(made: Provenance, *, versioned: bool = True) -> str:
    """Return what a passed canary is remembered under: all that can change which states are captured.

    Keys of Quarry 0.1.0 are not `versioned`: they do not hold Quarry's own version.
    """
    about = _about(made.identity) | {"engine": made.engine.model_dump(mode="json")}
    return canonical_sha256(about | {"quarry": made.service_version} if versioned else about)


def states_key(identity: Identity) -> str:
    """Return what the last passed canary of these states is remembered under, by whatever engine."""
    return canonical_sha256(_about(identity))


def _about(identity: Identity) -> dict[str, object]:
    return {
        "model": identity.model,
        "revision": identity.revision,
        "dtype": identity.dtype,
        "layer_ids": identity.layer_ids,
    }


def canary_prompts(vocab_size: int, max_len: int) -> list[list[int]]:
    """Return prompts of 1 to 129 token ids, none longer than `max_len`; always the same ones.

    The last shares a long prefix with the one before it, which a prefix cache serves. Ids come from the
    middle of the vocabulary, because both ends hold special tokens that some models act upon.
    """
    draw = np.random.default_rng(20_260_101)
    low, high = vocab_size // 4, max(vocab_size // 4 + 1, 3 * vocab_size // 4)
    lengths = sorted({min(length, max_len) for length in _LENGTHS})
    prompts = [draw.integers(low, high, length).tolist() for length in lengths]
    shared = min(_SHARED_PREFIX, max_len - 1)
    if shared > 0:
        prompts.append(prompts[-1][:shared] + draw.integers(low, high, lengths[-1] - shared).tolist())
    return prompts


def judge(
    captured: Sequence[Mapping[int, torch.Tensor]],
    reference: Sequence[Mapping[int, torch.Tensor]],
    layer_ids: Sequence[int],
    num_layers: int,
    dtype: Dtype,
    activation_bits: int | None = None,
) -> CanaryReport:
    """Hold captured states against the reference's, both by prompt and layer id, each [T, H].

    The reference holds every layer 0..N and POST_NORM; with `activation_bits` the engine rounds more than it.
    Each captured layer must point where its own reference points and must not be clearly nearer to another: a
    token at which neighbours cannot be told apart (a massive first token) does not count against it, but over
    all tokens its own layer must be the nearest.

    Raises:
        StatesWrong: names the layer, the distance, and which layer it looks like.
    """
    layers = []
    min_cosine = _MIN_COSINE[dtype] if activation_bits is None else _MIN_COSINE_8BIT
    for layer_id in layer_ids:
        distances = [
            distance_to(layer_id, got[layer_id], want) for got, want in zip(captured, reference, strict=True)
        ]
        for distance in distances:
            _check_prompt(layer_id, num_layers, distance, min_cosine)
        candidates = distances[0].candidates
        median_J = torch.cat([distance.error_JT for distance in distances], dim=1).median(dim=1).values
        best = candidates[int(median_J.argmin())]
        own = candidates.index(layer_id)
        if best != layer_id:
            seen, due = float(median_J.min()), float(median_J[own])
            about = f"median distance {due:.2e} to its own reference, {seen:.2e} to that layer"
            looks = looks_like(best, num_layers)
            raise StatesWrong(f"canary: layer {layer_id} {looks}: {about}", field="layers", cure=CURE)
        layers.append(
            LayerAgreement(
                layer_id=layer_id,
                cosine=min(float(distance.cosine_T.median()) for distance in distances),
                max_rel_error=max(float(distance.error_JT[own].max()) for distance in distances),
                best_match_layer=best,
            )
        )
    tokens = sum(len(states[layer_ids[0]]) for states in captured)
    return CanaryReport(prompts=len(captured), tokens=tokens, layers=tuple(layers))


def distance_to(layer_id: int, got_TH: torch.Tensor, want: Mapping[int, torch.Tensor]) -> Distance:
    """Measure [T, H] against a reference's layers; in float64: float32 cannot tell cosines near 1 apart.

    Raises StatesWrong where there are fewer or more tokens.
    """
    own_TH = want[layer_id].double()
    if got_TH.shape != own_TH.shape:
        shapes = f"{list(got_TH.shape)}, the reference {list(own_TH.shape)}"
        raise StatesWrong(f"canary: layer {layer_id} has shape {shapes}", field="layers")
    got_TH = got_TH.double()
    candidates = tuple(sorted(want))
    size_T = torch.linalg.vector_norm(own_TH, dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    error_JT = torch.stack(
        [torch.linalg.vector_norm(got_TH - want[other].double(), dim=1) / size_T for other in candidates]
    )
    return Distance(candidates, torch.cosine_similarity(got_TH, own_TH, dim=1), error_JT)


def _check_prompt(layer_id: int, num_layers: int, distance: Distance, min_cosine: float) -> None:
    own_T = distance.error_JT[distance.candidates.index(layer_id)]
    nearer_T = distance.error_JT.amin(dim=0) < _CLOSER * own_T
    fits_T = (distance.cosine_T >= min_cosine) & ~nearer_T
    share = float(fits_T.double().mean())
    if share >= _MIN_TOKENS:
        return
    misfits_JT = distance.error_JT[:, ~fits_T]
    best = distance.candidates[int(misfits_JT.median(dim=1).values.nan_to_num(torch.inf).argmin())]
    cosine = float(distance.cosine_T[~fits_T].median())
    looks = looks_like(best, num_layers) if best != layer_id else "fits no layer of the model"
    if not bool(own_T.isfinite().all()):
        looks = "is not finite"
    about = f"{1 - share:.0%} of {len(fits_T)} tokens, median cosine {cosine:.4f}, {min_cosine} is due"
    raise StatesWrong(f"canary: layer {layer_id} {looks}: {about}", field="layers", cure=CURE)


def looks_like(layer_id: int, num_layers: int) -> str:
    """Say which layer of the reference states are nearest to."""
    if layer_id == POST_NORM:
        return f"looks like layer {num_layers} after the final norm"
    return f"looks like layer {layer_id}"
