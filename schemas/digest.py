"""Canonical JSON and its digest: equal values give equal text."""

import hashlib
import json
from typing import Any

PIECE_LENGTH = 1000
"""Members of a list that are written at once: while C code writes them, no other thread runs."""
ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def canonical_json(value: Any) -> str:  # noqa: ANN401 - whatever JSON holds
    """Return `value` as ASCII JSON without spaces, keys sorted."""
    if isinstance(value, dict):
        members = (f"{ENCODER.encode(key)}:{canonical_json(value[key])}" for key in sorted(value))
        return "{" + ",".join(members) + "}"
    if isinstance(value, list) and len(value) > PIECE_LENGTH:
        starts = range(0, len(value), PIECE_LENGTH)
        pieces = (canonical_json(value[start : start + PIECE_LENGTH])[1:-1] for start in starts)
        return "[" + ",".join(pieces) + "]"
    if isinstance(value, list) and not {dict, list}.isdisjoint(map(type, value)):
        return "[" + ",".join(map(canonical_json, value)) + "]"  # one member may be as long as all
    return ENCODER.encode(value)


def canonical_sha256(value: Any) -> str:  # noqa: ANN401
    """Return the hex sha256 of `value`'s canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
