"""Presets and lists of layers as vLLM ids."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from schemas.request import ExtractRequest, LayerPreset
from service.errors import UnknownLayer
from service.plan.layers import resolve_layers


@pytest.mark.parametrize(
    ("preset", "num_layers", "expected"),
    [
        ("eagle3", 36, (2, 18, 33, 36)),
        ("eagle3", 32, (2, 16, 29, 32)),
        ("eagle3", 7, (2, 3, 4, 7)),
        ("eagle", 32, (32,)),
        ("mtp", 61, (61,)),
        ("dflash", 36, (2, 10, 18, 26, 34, 36)),
        ("dflash", 8, (2, 3, 4, 5, 6, 8)),
    ],
)
def test_a_preset_names_the_layers_that_its_drafters_read(
    preset: str, num_layers: int, expected: tuple[int, ...]
) -> None:
    assert resolve_layers(preset, True, num_layers) == expected


@pytest.mark.parametrize(
    ("preset", "num_layers"), [("eagle3", 6), ("eagle3", 3), ("dflash", 7), ("dflash", 1)]
)
def test_a_preset_that_collapses_is_refused_with_the_depth_and_a_list_that_works(
    preset: str, num_layers: int
) -> None:
    with pytest.raises(UnknownLayer, match=f"with {num_layers} layers") as caught:
        resolve_layers(preset, True, num_layers)
    assert caught.value.field == "layers" and caught.value.cure is not None
    suggested = caught.value.cure.split("example ")[1].strip("[]").split(", ")
    assert resolve_layers(tuple(int(k) for k in suggested), True, num_layers)


@pytest.mark.parametrize("preset", get_args(LayerPreset))
def test_a_preset_gives_ascending_ids_of_the_model_or_is_refused(preset: LayerPreset) -> None:
    for num_layers in range(1, 129):
        try:
            ids = resolve_layers(preset, True, num_layers)
        except UnknownLayer:
            assert num_layers < 8
        else:
            assert list(ids) == sorted(set(ids)) and ids[0] >= 1 and ids[-1] == num_layers


@pytest.mark.parametrize(
    ("layers", "final_layer", "num_layers", "expected"),
    [
        ((6, 0, 3), True, 8, (0, 3, 6, 8)),
        ((8, 2), True, 8, (2, 8)),
        ((6, 3), False, 8, (3, 6)),
        ("eagle3", False, 36, (2, 18, 33)),
    ],
)
def test_ids_are_sorted_and_the_last_layer_is_added_once_where_asked(
    layers: Any, final_layer: bool, num_layers: int, expected: tuple[int, ...]
) -> None:
    assert resolve_layers(layers, final_layer, num_layers) == expected


@pytest.mark.parametrize(
    ("layers", "final_layer", "reason", "field"),
    [
        ((9,), True, r"0 \(embeddings\) to 8", "layers"),
        ((2, 99), True, r"0 \(embeddings\) to 8", "layers"),
        ((-1, 2), True, r"0 \(embeddings\) to 8", "layers"),
        ("mtp", False, "nothing is left", "final_layer"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused(
    layers: Any, final_layer: bool, reason: str, field: str
) -> None:
    with pytest.raises(UnknownLayer, match=reason) as caught:
        resolve_layers(layers, final_layer, 8)
    assert caught.value.field == field


def test_a_request_names_no_layer_twice() -> None:
    source = {"kind": "inline", "samples": [{"text": "x"}]}
    with pytest.raises(ValidationError, match="names an id twice"):
        ExtractRequest.model_validate({"model": "org/m", "source": source, "layers": [2, 4, 2]})
