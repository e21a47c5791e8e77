"""Presets and lists of layers -> vLLM layer ids. Pure.

vLLM id `k` is the residual stream after `k` decoder layers, so a model of N layers has ids 0 (embeddings)
to N (pre-norm). The engine sorts and de-duplicates a list without a word and broadcasts some bad ones, so
nothing unchecked may reach it.
"""

from collections.abc import Callable

from schemas.request import LayerPreset
from service.errors import UnknownLayer

DFLASH_LAYERS = 5


def _eagle3(num_layers: int) -> list[int]:
    return [2, num_layers // 2, num_layers - 3]


def _last_only(num_layers: int) -> list[int]:
    del num_layers
    return []


def _dflash(num_layers: int) -> list[int]:
    """z-lab's rule counts layer outputs from 0 and spreads five over 1..N-3; a vLLM id is one more."""
    span = num_layers - 4
    return [round(1 + i * span / (DFLASH_LAYERS - 1)) + 1 for i in range(DFLASH_LAYERS)]


PRESETS: dict[LayerPreset, Callable[[int], list[int]]] = {
    "eagle3": _eagle3,
    "eagle": _last_only,
    "mtp": _last_only,
    "dflash": _dflash,
}
"""The auxiliary layers of each drafter family, beside the last one."""


def resolve_layers(
    layers: LayerPreset | tuple[int, ...], final_layer: bool, num_layers: int
) -> tuple[int, ...]:
    """Return the ascending vLLM ids to capture of a model of `num_layers` decoder layers.

    N is added with `final_layer`. Raises UnknownLayer: an id outside 0..N, an id twice, a preset that
    collapses on so shallow a model, or nothing left.
    """
    ids = _preset_ids(layers, num_layers) if isinstance(layers, str) else _listed_ids(layers, num_layers)
    if final_layer:
        ids.add(num_layers)
    if not ids:
        raise UnknownLayer(
            f"preset '{layers}' captures only the last layer, and 'final_layer' is false: nothing is left",
            field="final_layer",
            cure="leave 'final_layer' true, or give a list of layer ids",
        )
    return tuple(sorted(ids))


def _preset_ids(preset: LayerPreset, num_layers: int) -> set[int]:
    ids = PRESETS[preset](num_layers)
    if len(set(ids)) < len(ids) or any(k < 1 for k in ids):
        raise UnknownLayer(
            f"preset '{preset}' needs a deeper model: with {num_layers} layers it would be the ids {ids}",
            field="layers",
            cure=f"give a list of layer ids, for example {_suggestion(num_layers)}",
        )
    return set(ids)


def _listed_ids(layers: tuple[int, ...], num_layers: int) -> set[int]:
    outside = sorted(k for k in layers if not 0 <= k <= num_layers)
    if outside:
        raise UnknownLayer(
            f"the model has layer ids 0 (embeddings) to {num_layers} (pre-norm); it has no {outside}",
            field="layers",
            cure=f"give ids from 0 to {num_layers}, for example {_suggestion(num_layers)}",
        )
    if len(set(layers)) < len(layers):
        raise UnknownLayer(
            f"'layers' names an id twice: {sorted(layers)}", field="layers", cure="name each layer id once"
        )
    return set(layers)


def _suggestion(num_layers: int) -> list[int]:
    return sorted({1, max(1, num_layers // 2), max(1, num_layers - 1), num_layers})
