"""`jobs.json` beside the card: a push of one job reads no manifest of another."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.dataset.jobs_table import JobsTable
from schemas.names import JOBS_PATH, manifest_path
from schemas.request import HubTarget
from service.errors import OptionRefused
from service.publish.card import assigned_configs
from service.publish.publisher import publish_folder
from service.settings import Settings
from tests.support.desk import REPO, TOKEN, Desk
from tests.support.finished_job import JOB, OTHER_JOB, a_dataset
from tests.support.hub_state import regular_blob

THIRD_JOB = "j-3333333333333333"
NO_MEMORY = r"took more than 67108864 bytes of memory|ended with exit code -6"
"""In Python's own code, or in pydantic's."""


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("third")
    a_dataset(folder, THIRD_JOB)
    return folder


@pytest.fixture
def two(desk: Desk) -> Desk:
    """A repository of two jobs."""
    desk.push()
    desk.push(desk.other)
    desk.hub.paths_read.clear()
    return desk


def content(desk: Desk, path: str) -> bytes:
    found = desk.repo.head.tree[path].content
    assert found is not None
    return found


def table(desk: Desk) -> JobsTable:
    return JobsTable.model_validate_json(content(desk, JOBS_PATH))


def others_read(desk: Desk) -> set[str]:
    """Return the manifests of other jobs that a push of the third has read."""
    return {path for path in desk.hub.paths_read if path.startswith("manifests/")} - {
        manifest_path(THIRD_JOB)
    }


def test_a_push_reads_the_table_and_no_other_jobs_manifest(two: Desk, third: Path) -> None:
    two.push(third)
    assert JOBS_PATH in two.hub.paths_read
    assert others_read(two) == set()
    assert [job.job_id for job in table(two).jobs] == sorted([JOB, OTHER_JOB, THIRD_JOB])
    assert set(assigned_configs(content(two, "README.md").decode())) == {JOB, OTHER_JOB, THIRD_JOB}


def lacking_one(told: bytes) -> bytes:
    return json.dumps({"jobs": json.loads(told)["jobs"][:1]}).encode()


def of_another_manifest(told: bytes) -> bytes:
    """Every row says that it was made from a manifest of other content."""
    document = json.loads(told)
    for job in document["jobs"]:
        job["manifest"]["sha256"], job["manifest_git_oid"] = "0" * 64, "0" * 40
        job["totals"]["tokens"] = 7
    return json.dumps(document).encode()


def of_another_version(told: bytes) -> bytes:
    document = json.loads(told)
    document["jobs"][0]["provenance"]["identity"]["schema_version"] = 1
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (None, "does not list manifests/j-"),
        (lacking_one, "does not list manifests/j-"),
        (of_another_manifest, "does not list manifests/j-"),
        (of_another_version, "identity: format version 1, expected 2: capture the dataset anew"),
        (lambda told: b"{", "is not a table of this version: Invalid JSON"),
        (lambda told: b"[]", "is not a table of this version"),
        (lambda told: told.rstrip() + b" " * 2**24, "has 16"),
    ],
    ids=["none", "lacks one", "other manifests", "of before", "cut off", "no table", "too large"],
)
def test_a_table_that_does_not_say_what_is_there_is_refused_and_no_manifest_is_read(
    two: Desk, third: Path, damage: Callable[[bytes], bytes] | None, what: str
) -> None:
    changed = {} if damage is None else {JOBS_PATH: regular_blob(damage(content(two, JOBS_PATH)))}
    two.repo.add("damaged", changed, deleted=[] if changed else [JOBS_PATH])
    before = two.titles()
    answer = two.push(third)
    assert (answer["error"], answer["field"]) == ("OptionRefused", "hub.repo_id")
    assert what in answer["detail"] and f"{JOBS_PATH} in org/states" in answer["detail"]
    assert (two.titles(), others_read(two)) == (before, set())


@pytest.mark.slow
def test_what_takes_too_much_memory_or_time_in_a_repository_ends_its_own_process(two: Desk) -> None:
    """1. The table holds five million empty jobs. 2. The manifest holds as many shards."""
    many = b"{}" + b",{}" * 5_000_000
    two.repo.add("table", {JOBS_PATH: regular_blob(b'{"jobs":[' + many + b"]}")})
    settings = Settings(hub_endpoint=two.hub.url, hub_token=TOKEN, plan_memory_bytes=2**26)

    def refused(settings: Settings) -> str:
        with pytest.raises(OptionRefused, match="that read what org/states holds") as refusal:
            publish_folder(two.dataset, HubTarget(repo_id=REPO), settings)
        return refusal.value.detail

    assert re.search(NO_MEMORY, refused(settings))
    assert "took more than 0.01 s" in refused(settings.model_copy(update={"plan_silence_s": 0.01}))
    two.repo.add("manifest", {manifest_path(JOB): regular_blob(b'{"shards":[' + many + b"]}")})
    assert re.search(NO_MEMORY, refused(settings))


@pytest.mark.slow
def test_a_job_whose_manifest_a_person_deleted_leaves_the_table_and_the_card(two: Desk, third: Path) -> None:
    two.repo.add("by hand", {}, deleted=[manifest_path(OTHER_JOB)])
    two.push(third)
    assert [job.job_id for job in table(two).jobs] == sorted([JOB, THIRD_JOB])
    assert set(assigned_configs(content(two, "README.md").decode())) == {JOB, THIRD_JOB}
