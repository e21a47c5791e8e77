"""A request is checked before it is a job, and only then."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.names import job_id_from_key
from schemas.request import ExtractRequest
from service.api.submit import new_key, submit
from service.errors import (
    HubUnavailable,
    IdempotencyConflict,
    QuarryError,
    SourceRefused,
    TemplateRefused,
    UnknownLayer,
    UnknownModel,
)
from service.settings import Settings
from service.store import Store
from tests.support.api import api_settings, job_body, small_target, stored


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return api_settings(tmp_path)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with stored(settings) as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_target(tmp_path / "model")


def request(folder: Path, **changes: object) -> ExtractRequest:
    return ExtractRequest.model_validate(job_body(folder) | changes)


def test_a_good_request_is_a_job_under_the_id_of_its_key(store: Store, settings: Settings, model: Path):
    row = submit(request(model), "key", store, settings)
    assert row.id == job_id_from_key("key")
    assert store.job(row.id) == row


def test_made_keys_are_never_the_same():
    assert len({new_key() for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "/nowhere"}, UnknownModel),
        ({"layers": [5]}, UnknownLayer),
        ({"chat_template": "{% endfor %}"}, TemplateRefused),
        ({"source": {"kind": "file", "path": "missing.jsonl"}}, SourceRefused),
    ],
)
def test_a_bad_request_is_no_job(
    store: Store, settings: Settings, model: Path, changes: dict[str, object], error: type[QuarryError]
):
    with pytest.raises(error) as caught:
        submit(request(model, **changes), "key", store, settings)
    assert caught.value.field is not None
    assert caught.value.cure is not None
    assert sum(store.counts().values()) == 0


def test_a_repository_that_cannot_be_asked_about_is_no_job(store: Store, tmp_path: Path, model: Path):
    deaf = api_settings(tmp_path, hub_endpoint="http://127.0.0.1:9", hub_token="t")
    with pytest.raises(HubUnavailable):
        submit(request(model, hub={"repo_id": "a/b"}), "key", store, deaf)
    assert sum(store.counts().values()) == 0


def test_a_known_key_is_answered_without_looking_again(store: Store, settings: Settings, model: Path):
    first = submit(request(model), "key", store, settings)
    (model / "config.json").unlink()
    assert submit(request(model), "key", store, settings) == first
    with pytest.raises(IdempotencyConflict):
        submit(request(model, loss="last_turn"), "key", store, settings)
    with pytest.raises(UnknownModel):
        submit(request(model), "another key", store, settings)
