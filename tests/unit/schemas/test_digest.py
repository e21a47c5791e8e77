"""Canonical JSON that is written in pieces is the JSON that is written at once."""

import json
from typing import Any

import pytest

from schemas.digest import PIECE_LENGTH, canonical_json
from schemas.request import ExtractRequest

LONG = [{"b": number, "a": [None, "\u00e9", 0.1]} for number in range(2 * PIECE_LENGTH + 1)]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        {"z": {"y": [], "x": {}}, "a": "\u2028"},
        LONG,
        {"source": {"b": LONG, "a": LONG[:PIECE_LENGTH]}},
    ],
)
def test_canonical_json_is_json_with_sorted_keys_whatever_its_length(value: Any) -> None:
    assert canonical_json(value) == json.dumps(value, sort_keys=True, separators=(",", ":"))


def test_a_request_of_many_samples_is_read_back_as_it_was() -> None:
    samples = [{"text": f"sample {number}", "labels": {"k": "v"}} for number in range(PIECE_LENGTH + 1)]
    source = {"kind": "inline", "samples": samples}
    request = ExtractRequest.model_validate({"model": "m", "layers": [1], "source": source})
    assert request.canonical_json() == canonical_json(request.model_dump(mode="json"))
    assert ExtractRequest.model_validate_json(request.canonical_json()) == request
