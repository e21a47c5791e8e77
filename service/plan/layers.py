"""Resolves presets and lists of layers to vLLM layer ids. Pure functions.

vLLM's id `k` is the residual stream after `k` decoder layers, so a model of N layers has ids 0 (embeddings)
to N (pre-norm). The engine silently sorts and de-duplicates a list and broadcasts some invalid ones, so
nothing unchecked may reach it.
"""

from schemas.request import LayerPreset
from service.errors import UnknownLayer


def auxiliary_layers(preset: LayerPreset, num_layers: int) -> list[int]:
    """Return the layers that a drafter family reads besides the last one."""
    match preset:
        case "eagle3":
            return [2, num_layers // 2, num_layers - 3]
        case "eagle" | "mtp":
            return []
        case "dflash":
            # z-lab counts layer outputs from 0 and spreads five over 1..N-3; vLLM ids are one higher.
            return [round(1 + i * (num_layers - 4) / 4) + 1 for i in range(5)]


def resolve_layers(
    layers: LayerPreset | tuple[int, ...], final_layer: bool, num_layers: int
) -> tuple[int, ...]:
    """Return the ascending vLLM ids to capture of a model of `num_layers` decoder layers.

    A list has no duplicate ids. N is added if `final_layer`. Raises UnknownLayer for an id outside 0..N, a
    preset that needs a deeper model, or an empty result.
    """
    ids = _preset_ids(layers, num_layers) if isinstance(layers, str) else _listed_ids(layers, num_layers)
    if final_layer:
        ids.add(num_layers)
    if not ids:
        detail = (
            f"preset '{layers}' captures only the last layer, and 'final_layer' is false: nothing is left"
        )
        cure = "leave 'final_layer' true, or give a list of layer ids"
        raise UnknownLayer(detail, field="final_layer", cure=cure)
    return tuple(sorted(ids))


def _preset_ids(preset: LayerPreset, num_layers: int) -> set[int]:
    ids = auxiliary_layers(preset, num_layers)
    if len(set(ids)) < len(ids) or any(k < 1 for k in ids):
        detail = f"preset '{preset}' needs a deeper model: with {num_layers} layers it would be the ids {ids}"
        cure = f"give a list of layer ids, for example {_suggestion(num_layers)}"
        raise UnknownLayer(detail, field="layers", cure=cure)
    return set(ids)


def _listed_ids(layers: tuple[int, ...], num_layers: int) -> set[int]:
    outside = sorted(k for k in layers if not 0 <= k <= num_layers)
    if outside:
        detail = f"the model has layer ids 0 (embeddings) to {num_layers} (pre-norm); it has no {outside}"
        cure = f"give ids from 0 to {num_layers}, for example {_suggestion(num_layers)}"
        raise UnknownLayer(detail, field="layers", cure=cure)
    return set(layers)


def _suggestion(num_layers: int) -> list[int]:
    return sorted({1, max(1, num_layers // 2), max(1, num_layers - 1), num_layers})
