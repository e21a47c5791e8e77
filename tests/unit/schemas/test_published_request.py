"""What a dataset shows of the request that it was made of."""

import json

import pytest

from schemas.request import ExtractRequest, PublishedRequest

HUB = {"repo_id": "org/states", "config_name": "states"}


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ({"kind": "inline", "samples": [{"text": "a secret"}]}, {"kind": "inline"}),
        (
            {"kind": "file", "path": "/home/somebody/rows.jsonl"},
            {"kind": "file", "path": "rows.jsonl", "limit": None},
        ),
    ],
    ids=["inline", "file"],
)
def test_neither_samples_nor_paths_of_the_host_are_published(source: dict, shown: dict) -> None:
    request = ExtractRequest.model_validate({"model": "/home/somebody/model", "source": source, "hub": HUB})
    published = json.loads(request.published().model_dump_json())
    assert (published["model"], published["source"]) == ("./model", shown)
    assert published["hub"] == {"private": True, **HUB}
    whole = json.loads(request.model_dump_json())
    assert published == whole | {"model": "./model", "source": shown}


def test_the_whole_request_of_an_older_manifest_is_read() -> None:
    request = ExtractRequest.model_validate(
        {"model": "org/model", "source": {"kind": "inline", "samples": [{"text": "a"}]}}
    )
    older = PublishedRequest.model_validate_json(request.model_dump_json())
    assert json.loads(older.model_dump_json()) == json.loads(request.model_dump_json())
