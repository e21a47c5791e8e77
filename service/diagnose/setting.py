"""What a drafter is fed, and every way in which that may have been otherwise when it was trained. Pure.

Layers are vLLM's ids: k is the residual stream after k decoder layers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Literal

MAX_ORDERS = 6
_THETAS = (10_000.0, 500_000.0, 1_000_000.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is fed at place t: states of `layers` side by side at t + `states_by`, token t + 1 + `tokens_by`.

    `states` and `tokens` are the row's own, another row's, or none. `config` replaces values of the drafter's
    config.json.
    """

    layers: tuple[int, ...]
    normed: bool = False
    states_by: int = 0
    tokens_by: int = 0
    positions_by: int = 0
    scale: float = 1.0
    dtype: str = ""
    states: Literal["own", "other", "none"] = "own"
    tokens: Literal["own", "other"] = "own"
    embedding: Literal["own", "target", "head"] = "own"
    map: Literal["own", "absolute", "none", "next", "previous"] = "own"
    config: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One thing changed, and what puts it right. A `probe` is measured and never named as a cause."""

    name: str
    cure: str
    to: Mapping[str, Any] = field(default_factory=dict)
    probe: bool = False

    def of(self, setting: Setting) -> Setting:
        """Return the setting with this change."""
        return replace(setting, **self.to)


PROBES = (
    Change("states of another row", "", {"states": "other"}, probe=True),
    Change("states all zero", "", {"states": "none"}, probe=True),
    Change("tokens of another row", "", {"tokens": "other"}, probe=True),
)


def changes(base: Setting, config: Mapping[str, Any], key: str, num_layers: int) -> Iterator[Change]:
    """Yield every change of `base` to try. `config` is the drafter's; `key` is its field of the layers."""
    yield from PROBES
    yield from _layers(base, key, num_layers)
    what = "the trainer's data must pair state t with token t + 1, as vLLM does"
    for by, word in ((-1, "one earlier"), (1, "one later")):
        yield Change(f"states {word}", what, {"states_by": base.states_by + by})
    yield Change("tokens one earlier", what, {"tokens_by": base.tokens_by - 1})
    yield Change("positions one later", "", {"positions_by": 1}, probe=True)
    norm = "before" if base.normed else "after"
    yield Change(
        f"states {norm} the final norm",
        f"train on what vLLM feeds: the states {'after' if base.normed else 'before'} the final norm",
        {"normed": not base.normed},
    )
    for scale in (0.5, 2.0):
        yield Change(f"states times {scale:g}", "train on the states as they are served", {"scale": scale})
    for dtype in ("bfloat16", "float16"):
        yield Change(f"states in {dtype}", f'serve with "dtype": "{dtype}"', {"dtype": dtype})
    yield Change(
        "the target's embeddings",
        "leave embed_tokens out of the drafter's checkpoint",
        {"embedding": "target"},
    )
    yield Change(
        "the target's head as embeddings",
        "copy embed_tokens from the target's input embeddings",
        {"embedding": "head"},
    )
    yield from _maps()
    yield from _config(base, config)


def _layers(base: Setting, key: str, num_layers: int) -> Iterator[Change]:
    declared, seen = base.layers, {base.layers}

    def change(name: str, layers: Sequence[int]) -> Iterator[Change]:
        ids = tuple(layers)
        if ids in seen or not all(0 <= k <= num_layers for k in ids):
            return
        seen.add(ids)
        note = "" if sorted(set(ids)) == list(ids) else " (vLLM feeds each layer once, ascending: train so)"
        yield Change(f"{name}: {list(ids)}", f'"{key}": {list(ids)}{note}', {"layers": ids})

    if len(declared) > 1:
        yield from change("every layer one lower", [k - 1 for k in declared])
        yield from change("every layer one higher", [k + 1 for k in declared])
    for place, k in enumerate(declared):
        for by, word in ((-1, "lower"), (1, "higher")):
            yield from change(f"layer {k} one {word}", [*declared[:place], k + by, *declared[place + 1 :]])
    for order in list(permutations(declared))[1:MAX_ORDERS]:
        yield from change("another order", order)
    if len(declared) > 1:
        for k in declared:
            yield from change("one layer in every place", [k] * len(declared))
        for place in range(1, len(declared)):
            doubled = [*declared]
            doubled[place] = doubled[place - 1]
            yield from change("a layer twice", doubled)


def _maps() -> Iterator[Change]:
    cure = "write d2t as target id minus draft id, from the counts that the drafter was trained with"
    yield Change("d2t holds target ids, not offsets", cure, {"map": "absolute"})
    yield Change("no vocabulary map", cure, {"map": "none"})
    yield Change("draft ids one higher", cure, {"map": "next"})
    yield Change("draft ids one lower", cure, {"map": "previous"})


def _config(base: Setting, config: Mapping[str, Any]) -> Iterator[Change]:
    inner = "transformer_layer_config"
    layer: Mapping[str, Any] = config.get(inner, {})
    flags = ("norm_before_residual", "norm_output")
    tried: list[dict[str, Any]] = [{name: not config[name]} for name in flags if name in config]
    theta = (layer.get("rope_parameters") or layer).get("rope_theta")
    tried += [{f"{inner}.rope_theta": value} for value in _THETAS if theta not in (None, value)]
    eps = layer.get("rms_norm_eps")
    tried += [{f"{inner}.rms_norm_eps": value} for value in (1e-6, 1e-5) if eps not in (None, value)]
    heads, groups = layer.get("num_attention_heads"), layer.get("num_key_value_heads")
    width = layer.get("head_dim") or (heads and layer.get("hidden_size", 0) // heads)
    for times, over in ((2, 1), (1, 2)):
        if (
            heads
            and groups
            and width
            and not (heads * times % over or groups * times % over or width * over % times)
        ):
            sizes = (heads * times // over, groups * times // over, width * over // times)
            names = ("num_attention_heads", "num_key_value_heads", "head_dim")
            tried.append({f"{inner}.{name}": size for name, size in zip(names, sizes, strict=True)})
    for values in tried:
        line = ", ".join(f'"{name}": {json.dumps(value)}' for name, value in values.items())
        line = line.replace(f"{inner}.", "")
        yield Change(f"config with {line}", line, {"config": (*base.config, *values.items())})
