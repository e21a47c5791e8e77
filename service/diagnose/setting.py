"""What a drafter is fed, and every way in which its training may have differed. Pure functions.

Layer ids are vLLM's: k is the residual stream after k decoder layers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Literal

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
"""The field for the layers in a drafter's config.json."""
_LAYER = "transformer_layer_config"
_MAX_ORDERS = 6
_OTHER_VALUES = {
    "rope_parameters.rope_theta": (10_000.0, 500_000.0, 1_000_000.0, 5_000_000.0),
    "rms_norm_eps": (1e-6, 1e-5),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is fed at each place.

    At place t: the concatenated states of `layers` at t + `states_by`, and token t + 1 + `tokens_by`.

    `states` and `tokens` are the row's own or another row's. `weights` are the drafter's own, or some are
    replaced by the target's: its embeddings, its head as embeddings (`tied`), or its head. `config` replaces
    values in the drafter's config.json, by dotted names.
    """

    layers: tuple[int, ...]
    normed: bool = False
    states_by: int = 0
    tokens_by: int = 0
    positions_by: int = 0
    scale: float = 1.0
    dtype: str = ""
    states: Literal["own", "other"] = "own"
    tokens: Literal["own", "other"] = "own"
    weights: Literal["own", "embeddings", "tied", "head"] = "own"
    map: Literal["own", "absolute", "none", "next", "previous"] = "own"
    config: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One change and its cure. A `probe` is measured but never reported as a cause."""

    name: str
    cure: str
    to: Mapping[str, Any] = field(default_factory=dict)
    probe: bool = False

    def of(self, setting: Setting) -> Setting:
        """Return the setting with this change."""
        return replace(setting, **self.to)


def changes(base: Setting, config: Mapping[str, Any], num_layers: int) -> Iterator[Change]:
    """Yield every change of `base` to try. `config` is the drafter's, with defaults filled in."""
    yield Change("states of another row", "", {"states": "other"}, probe=True)
    yield Change("states all zero", "", {"scale": 0.0}, probe=True)
    yield Change("tokens of another row", "", {"tokens": "other"}, probe=True)
    yield Change("positions one later", "", {"positions_by": 1}, probe=True)
    yield from _layers(base, num_layers, are_named=LAYERS_KEY in config)
    pairs = "the trainer's data must pair state t with token t + 1, as vLLM does"
    yield Change("states one earlier", pairs, {"states_by": base.states_by - 1})
    yield Change("states one later", pairs, {"states_by": base.states_by + 1})
    yield Change("tokens one earlier", pairs, {"tokens_by": base.tokens_by - 1})
    other, served = ("before", "after") if base.normed else ("after", "before")
    norm = f"train on what vLLM feeds: the states {served} the final norm"
    yield Change(f"states {other} the final norm", norm, {"normed": not base.normed})
    for scale in (0.5, 2.0):
        yield Change(f"states times {scale:g}", "train on the states as they are served", {"scale": scale})
    for dtype in ("bfloat16", "float16"):
        yield Change(f"states in {dtype}", f'serve with "dtype": "{dtype}"', {"dtype": dtype})
    embeddings = "leave embed_tokens out of the drafter's checkpoint: the target's are shared"
    yield Change("the target's embeddings", embeddings, {"weights": "embeddings"})
    yield Change("the target's head as embeddings", embeddings, {"weights": "tied"})
    yield Change(
        "the target's head", "copy lm_head.weight from the target, or from the trainer", {"weights": "head"}
    )
    d2t = "write d2t as target id minus draft id, from the counts that the drafter was trained with"
    yield Change("d2t holds target ids, not offsets", d2t, {"map": "absolute"})
    yield Change("no vocabulary map", d2t, {"map": "none"})
    yield Change("draft ids one higher", d2t, {"map": "next"})
    yield Change("draft ids one lower", d2t, {"map": "previous"})
    for values in _configs(config):
        line = ", ".join(f'"{name.split(".")[-1]}": {json.dumps(value)}' for name, value in values.items())
        yield Change(f"config with {line}", line, {"config": (*base.config, *values.items())})


def _layers(base: Setting, num_layers: int, *, are_named: bool) -> Iterator[Change]:
    seen = {base.layers}
    for name, ids in _layer_lists(base.layers):
        layers = tuple(ids)
        if layers in seen or not all(0 <= k <= num_layers for k in layers):
            continue
        seen.add(layers)
        ascending = sorted(set(layers)) == list(layers)
        note = "" if ascending else " (vLLM feeds each layer once, ascending: train so)"
        line = f'"{LAYERS_KEY}": {list(layers)}{note}'
        cure = line if are_named else "train on what vLLM feeds: the states of the last layer"
        yield Change(f"{name}: {list(layers)}", cure, {"layers": layers})


def _layer_lists(declared: tuple[int, ...]) -> Iterator[tuple[str, Sequence[int]]]:
    for by, word in ((-1, "lower"), (1, "higher")):
        yield f"every layer one {word}", [k + by for k in declared]
        for place, k in enumerate(declared):
            yield f"layer {k} one {word}", [*declared[:place], k + by, *declared[place + 1 :]]
    for order in list(permutations(declared))[:_MAX_ORDERS]:
        yield "another order", order
    for k in declared:
        yield "one layer in every place", [k] * len(declared)
    for place in range(1, len(declared)):
        yield "a layer twice", [*declared[:place], declared[place - 1], *declared[place + 1 :]]


def _configs(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changed values of a config by dotted names."""
    for flag in ("norm_before_residual", "norm_output"):
        if flag in config:
            yield {flag: not config[flag]}
    layer = config.get(_LAYER, {})
    ropes = {
        f"{_LAYER}.rope_parameters.{name}": value for name, value in layer.get("rope_parameters", {}).items()
    }
    numbers = {f"{_LAYER}.{name}": value for name, value in layer.items()} | ropes
    for name, values in _OTHER_VALUES.items():
        own = numbers.get(f"{_LAYER}.{name}")
        yield from ({f"{_LAYER}.{name}": value} for value in values if own not in (None, value))
    heads = [f"{_LAYER}.{name}" for name in ("num_attention_heads", "num_key_value_heads", "head_dim")]
    if all(numbers.get(name) for name in heads):
        for factors in ((2.0, 2.0, 0.5), (0.5, 0.5, 2.0)):
            sizes = {name: numbers[name] * factor for name, factor in zip(heads, factors, strict=True)}
            if all(size.is_integer() for size in sizes.values()):
                yield {name: int(size) for name, size in sizes.items()}
