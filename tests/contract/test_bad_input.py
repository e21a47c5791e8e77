"""What users get wrong is answered with the field and the cure, and costs nothing that was right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from schemas.request import ExtractRequest
from service.control.submit import submit
from service.errors import (
    HubDenied,
    QuarryError,
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
    return random_target(folder, arch="llama", layers=8, hidden=64, dtype="float32", max_position=256)


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
        submit(request(target, GOOD, **changes), "key", shop.store, shop.settings)
    assert caught.value.field == field
    assert caught.value.cure
    assert shop.store.read(jobs.page)[0] == []


def test_a_repository_without_permission_makes_no_job(tmp_path, target):
    with FakeHub() as hub:
        hub.add_token("hf_reader", Token(user="somebody", role="read"))
        shop = Shop.open(tmp_path, target, hub_endpoint=hub.url, hub_token="hf_reader")
        with pytest.raises(HubDenied) as caught:
            submit(request(target, GOOD, hub={"repo_id": "team/states"}), "key", shop.store, shop.settings)
        assert caught.value.field == "hub.repo_id"
        assert "hf_reader" not in repr(caught.value.problem())
        assert shop.store.read(jobs.page)[0] == []
        shop.store.close()


def failure_of(shop: Shop, body: ExtractRequest) -> QuarryError | Any:
    """Return the problem of a job that only planning can refuse."""
    job_id = shop.submit(body)
    shop.plan()
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.FAILED, job
    assert job.problem is not None
    return job.problem


def test_an_empty_source_fails_the_job_by_its_field(shop, target, tmp_path):
    (tmp_path / "sources" / "empty.jsonl").write_text("")
    problem = failure_of(shop, request(target, GOOD, **file_source(tmp_path / "sources" / "empty.jsonl")))
    assert problem.field.startswith("source")
    assert problem.cure


def test_a_template_that_fails_on_any_conversation_fails_the_job_by_its_field(shop, target):
    problem = failure_of(shop, request(target, GOOD, chat_template="{{ raise_exception('never') }}"))
    assert problem.field == "chat_template"
    assert "never" in problem.detail


@pytest.mark.parametrize(
    ("sample", "changes"),
    [
        ({"id": "bad", "token_ids": list(range(1, 250))}, {"on_too_long": "reject", "max_tokens": 200}),
        ({"id": "bad", "token_ids": [1, 2, 1_000_000]}, {}),
        ({"id": "bad", "messages": [{"role": "user", "content": "alone"}]}, {}),
        ({"id": "bad", "text": ""}, {}),
    ],
    ids=["too long", "invalid token id", "nothing supervised", "no tokens"],
)
def test_a_bad_sample_is_a_reject_with_a_reason_and_the_others_are_written(shop, target, sample, changes):
    short = conversations(4, longest=5)
    job = shop.run(request(target, [*short[:2], sample, *short[2:]], **changes))
    assert job.state is JobState.COMPLETED, job.problem
    assert {row["source_id"] for row in shop.rows(job.id)} == {"c0", "c1", "c2", "c3"}
    (reject,) = shop.store.read(commits.rejects, job.id)
    assert (reject.source_id, reject.position) == ("bad", 2)
    assert reject.reason
    assert reject.detail


def test_a_sample_longer_than_the_model_is_truncated_when_that_is_asked_for(shop, target):
    long = {"id": "long", "token_ids": [7] * 400}
    job = shop.run(request(target, [long], max_tokens=4096, on_too_long="truncate"))
    (row,) = shop.rows(job.id)
    assert row["num_tokens"] == 255


@pytest.mark.parametrize(
    ("layers", "expected"), [("dflash", (2, 3, 4, 5, 6, 8)), ((2, 1), (1, 2, 8)), ((8,), (8,))]
)
def test_layer_lists_are_stored_sorted_with_the_last_layer_added_and_nothing_else_about_them_changes(
    shop, target, layers, expected
):
    job = shop.run(request(target, GOOD, layers=layers))
    assert job.identity is not None
    assert job.identity.layer_ids == expected
