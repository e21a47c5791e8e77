"""`jobs.json` beside the card: a push of one job reads no manifest of another."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.dataset.jobs_table import JobsTable
from schemas.names import JOBS_PATH, manifest_path
from service.publish.card import assigned_configs
from tests.support.desk import Desk
from tests.support.finished_job import JOB, OTHER_JOB, a_dataset
from tests.support.hub_state import regular_blob

THIRD_JOB = "j-3333333333333333"
BOTH = {manifest_path(JOB), manifest_path(OTHER_JOB)}


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


def test_a_repository_without_a_table_gets_one(two: Desk, third: Path) -> None:
    """As an earlier version leaves it. The push after the next one reads no manifest."""
    complete = table(two)
    two.repo.add("an earlier version's", {}, deleted=[JOBS_PATH])
    two.push(third)
    assert others_read(two) == BOTH
    assert [job for job in table(two).jobs if job.job_id != THIRD_JOB] == list(complete.jobs)
    two.hub.paths_read.clear()
    two.push(third)
    assert others_read(two) == set()


def lacking_one(told: bytes) -> bytes:
    return json.dumps({"jobs": json.loads(told)["jobs"][:1]}).encode()


def of_another_manifest(told: bytes) -> bytes:
    """Every row says that it was made from a manifest of other content."""
    document = json.loads(told)
    for job in document["jobs"]:
        job["manifest"]["sha256"], job["manifest_git_oid"] = "0" * 64, "0" * 40
        job["totals"]["tokens"] = 7
    return json.dumps(document).encode()


def of_a_newer_version(told: bytes) -> bytes:
    return json.dumps(json.loads(told) | {"new": 1}).encode()


@pytest.mark.parametrize(
    ("damage", "num_read"),
    [
        (lacking_one, 1),
        (of_another_manifest, 2),
        (of_a_newer_version, 2),
        (lambda told: b"{", 2),
        (lambda told: b"", 2),
        (lambda told: b"[]", 2),
    ],
    ids=["lacks one", "other manifests", "newer", "cut off", "empty", "no table"],
)
def test_what_the_table_does_not_say_is_read_from_the_manifests(
    two: Desk, third: Path, damage: Callable[[bytes], bytes], num_read: int
) -> None:
    complete = table(two)
    two.repo.add("damaged", {JOBS_PATH: regular_blob(damage(content(two, JOBS_PATH)))})
    two.push(third)
    assert len(others_read(two)) == num_read
    assert [job for job in table(two).jobs if job.job_id != THIRD_JOB] == list(complete.jobs)


def test_a_job_whose_manifest_a_person_deleted_leaves_the_table_and_the_card(two: Desk, third: Path) -> None:
    two.repo.add("by hand", {}, deleted=[manifest_path(OTHER_JOB)])
    two.push(third)
    assert [job.job_id for job in table(two).jobs] == sorted([JOB, THIRD_JOB])
    assert set(assigned_configs(content(two, "README.md").decode())) == {JOB, THIRD_JOB}
