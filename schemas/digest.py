"""Canonical JSON and its digest: equal values give equal text."""

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:  # noqa: ANN401 - whatever JSON holds
    """Return `value` as ASCII JSON without spaces, keys sorted."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def canonical_sha256(value: Any) -> str:  # noqa: ANN401
    """Return the hex sha256 of `value`'s canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
