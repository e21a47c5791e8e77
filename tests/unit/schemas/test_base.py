"""What is wrong with a value that was sent is told in few words, however often it is wrong."""

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.base import Wire
from schemas.dataset.jobs_table import JobsTable
from schemas.dataset.manifest import Manifest
from schemas.keys import Grants
from schemas.request import ExtractRequest
from schemas.source import Sample

MANY = 10_000
INLINE = {"kind": "inline", "samples": [{"text": "x"}]}
BODIES: dict[str, tuple[type[Wire], dict[str, Any]]] = {
    "layers": (ExtractRequest, {"layers": ["a"] * MANY}),
    "labels": (ExtractRequest, {"labels": [1] * MANY}),
    "tools": (ExtractRequest, {"tools": [1] * MANY}),
    "template": (ExtractRequest, {"chat_template_kwargs": {str(number): set() for number in range(MANY)}}),
    "stop": (ExtractRequest, {"generate": {"max_tokens": 1, "stop": [1] * MANY}}),
    "mix": (ExtractRequest, {"source": {"kind": "mix", "sources": [1] * MANY}}),
    "samples": (ExtractRequest, {"source": {"kind": "inline", "samples": [{}] * MANY}}),
    "sample's labels": (Sample, {"text": "x", "labels": {str(number): 1 for number in range(MANY)}}),
    "tokens": (Sample, {"token_ids": [-1] * MANY}),
    "scopes": (Grants, {"scopes": [1] * MANY}),
    "shards": (Manifest, {"shards": [{}] * MANY}),
    "jobs": (JobsTable, {"jobs": [{}] * MANY}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_list_or_a_mapping_of_faults_is_one_fault(name: str) -> None:
    """Each would take a kilobyte: a body of 8 MiB took 7 GB, a `jobs.json` of 1 MB took 3."""
    kind, body = BODIES[name]
    given = {"model": "/m", "source": INLINE} if kind is ExtractRequest else {}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(given | body)
    assert refused.value.error_count() < 30


def test_what_a_template_is_given_has_a_bounded_number_of_values() -> None:
    """The encoder of JSON lets no other thread run: over 4 million zeros `/healthz` waited for 400 ms."""
    tool = {"a": [[0] * 60_000, {"b": 40_000 * [0]}]}
    with pytest.raises(ValidationError, match="more than 100000 values"):
        Sample.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
    tool["a"].pop()
    Sample.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
