"""Canonical JSON that is written in pieces is the JSON that is written at once."""

import json
from typing import Any

import pytest

from schemas import digest
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
        [{"b": [*range(3 * PIECE_LENGTH)], "a": {}}, [[]], [LONG, 1e400, ""], True],
    ],
)
def test_canonical_json_is_json_with_sorted_keys_whatever_its_length(value: Any) -> None:
    assert canonical_json(value) == json.dumps(value, sort_keys=True, separators=(",", ":"))


def test_no_encoder_gets_more_than_a_piece_wherever_the_length_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    class Measured(json.JSONEncoder):
        def encode(self, o: Any) -> str:
            lengths.append(len(str(o)))
            return super().encode(o)

    monkeypatch.setattr(digest, "ENCODER", Measured(sort_keys=True, separators=(",", ":")))
    canonical_json(
        {"samples": [{"token_ids": [0] * 10 * PIECE_LENGTH}, {"messages": [{"content": "x"}] * 900}]}
    )
    assert max(lengths) == len(str([0] * PIECE_LENGTH))


def test_a_request_of_many_samples_is_read_back_as_it_was() -> None:
    samples = [{"text": f"sample {number}", "labels": {"k": "v"}} for number in range(PIECE_LENGTH + 1)]
    source = {"kind": "inline", "samples": samples}
    request = ExtractRequest.model_validate({"model": "m", "layers": [1], "source": source})
    assert request.canonical_json() == canonical_json(request.model_dump(mode="json"))
    assert ExtractRequest.model_validate_json(request.canonical_json()) == request
