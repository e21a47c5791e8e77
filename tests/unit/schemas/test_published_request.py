"""What a dataset shows of the request that it was made of."""

import json

import pytest

from schemas.request import ExtractRequest

HOOK = {"url": "https://hooks.example/a-secret"}
HUB = {"repo_id": "org/states", "config_name": "states"}


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ({"kind": "inline", "samples": [{"text": "a secret"}]}, {"kind": "inline"}),
        (
            {"kind": "file", "path": "/home/somebody/rows.jsonl", "min_age_s": 5, "marker": ".ok"},
            {"kind": "file", "path": "rows.jsonl", "limit": None, "min_age_s": 5, "marker": ".ok"},
        ),
    ],
    ids=["inline", "file"],
)
def test_neither_samples_nor_paths_of_the_host_are_published(source: dict, shown: dict) -> None:
    request = ExtractRequest.model_validate(
        {"model": "/home/somebody/model", "source": source, "hub": HUB, "webhook": HOOK}
    )
    published = json.loads(request.published().model_dump_json())
    assert (published["model"], published["source"]) == ("./model", shown)
    assert published["hub"] == {"private": True, **HUB}
    whole = json.loads(request.model_dump_json())
    assert published == whole | {"model": "./model", "source": shown, "webhook": None}
