"""What users get wrong is answered with the field and the cure, and costs nothing that was right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.control.request_body import CheckedRequest
from service.control.submit import submit
from service.errors import (
    HubDenied,
    SourceRefused,
    TemplateRefused,
    UnknownLayer,
    UnknownModel,
)
from service.store import commits, jobs
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token
from tests.support.jobs import Shop, conversations, request
from tests.support.tiny_model import random_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return random_target(folder, arch="llama", hidden=64, dtype="float32", max_position=256)


@pytest.fixture
def shop(tmp_path: Path, target: Path) -> Iterator[Shop]:
    (tmp_path / "sources").mkdir()
    made = Shop.open(tmp_path, target, source_roots=(tmp_path / "sources",))
    yield made
    made.store.close()


GOOD = conversations(4)


def file_source(path: object) -> dict[str, Any]:
    return {"source": {"kind": "file", "path": str(path)}}


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"model": "/no/such/model"}, UnknownModel, "model"),
        ({"layers": (3, 9)}, UnknownLayer, "layers"),
        ({"chat_template": "{% for turn in %}"}, TemplateRefused, "chat_template"),
        (file_source("/etc/passwd"), SourceRefused, "source.path"),
        (file_source("../../elsewhere.jsonl"), SourceRefused, "source.path"),
        (file_source("missing.jsonl"), SourceRefused, "source.path"),
    ],
    ids=["unknown model", "unknown layer", "broken template", "outside", "climbing out", "missing"],
)
def test_a_mistake_that_can_be_seen_at_once_makes_no_job(shop, target, changes, error, field):
    with pytest.raises(error) as caught:
        submit(CheckedRequest.of(request(target, GOOD, **changes)), "key", shop.store, shop.settings)
    assert caught.value.field == field
    assert caught.value.cure
    assert shop.store.read(jobs.page)[0] == []


def test_a_repository_without_permission_makes_no_job(tmp_path, target):
    with FakeHub() as hub:
        hub.add_token("hf_reader", Token(user="somebody", role="read"))
        shop = Shop.open(tmp_path, target, hub_endpoint=hub.url, hub_token="hf_reader")
        with pytest.raises(HubDenied) as caught:
            body = CheckedRequest.of(request(target, GOOD, hub={"repo_id": "team/states"}))
            submit(body, "key", shop.store, shop.settings)
        assert caught.value.field == "hub.repo_id"
        assert "hf_reader" not in repr(caught.value.problem())
        assert shop.store.read(jobs.page)[0] == []
        shop.store.close()


BAD = {
    "too-long": {"token_ids": list(range(1, 250))},
    "id-outside-vocabulary": {"token_ids": [1, 2, 1_000_000]},
    "nothing-supervised": {"messages": [{"role": "user", "content": "alone"}]},
    "empty": {"text": ""},
}


def test_a_bad_sample_is_a_reject_with_a_reason_and_the_others_are_written(shop, target):
    short = conversations(4, longest=5)
    bad = [{"id": reason} | sample for reason, sample in BAD.items()]
    samples = [*short[:2], *bad, *short[2:]]
    job = shop.run(request(target, samples, on_too_long="reject", max_tokens=200))
    assert job.state is JobState.COMPLETED, job.problem
    assert {row["source_id"] for row in shop.rows(job.id)} == {"c0", "c1", "c2", "c3"}
    rejects = shop.store.read(commits.rejects, job.id)
    assert [reject.position for reject in rejects] == [2, 3, 4, 5]
    assert [reject.source_id for reject in rejects] == list(BAD)
    assert all(reject.reason == reject.source_id and reject.detail for reject in rejects)


def test_a_sample_longer_than_the_model_is_truncated_when_that_is_asked_for(shop, target):
    long = {"id": "long", "token_ids": [7] * 400}
    job = shop.run(request(target, [long], max_tokens=4096, on_too_long="truncate"))
    (row,) = shop.rows(job.id)
    assert row["num_tokens"] == 255


def test_layers_are_stored_sorted_with_the_last_one(shop, target):
    job = shop.run(request(target, GOOD, layers=(2, 1)))
    assert job.identity is not None
    assert job.identity.layer_ids == (1, 2, 8)
