"""`jobs.json`, held against the manifests: what would end the next push, or give a wrong card."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from schemas.dataset.files import LocalFile
from schemas.dataset.jobs_table import MAX_TABLE_BYTES
from schemas.names import JOBS_PATH, manifest_path, shard_path
from service.artifacts.dataset_files import HubFiles, LocalFiles
from service.proof.verify import verify_dataset
from tests.support.fake_hub import FakeHub
from tests.unit.proof.made_dataset import MANIFEST, Dataset, said, write_table

GONE = "j-0000000000000000"


def add_one_that_is_gone(rows: list[dict[str, Any]]) -> None:
    gone = json.loads(json.dumps(rows[0]).replace(rows[0]["provenance"]["job_id"], GONE))
    rows.append(gone)


def make_stale(rows: list[dict[str, Any]]) -> None:
    rows[0]["manifest"]["sha256"], rows[0]["manifest_git_oid"] = "0" * 64, "0" * 40


@pytest.mark.parametrize("change", [lambda rows: None, lambda rows: rows[0].update(config_name="early")])
def test_a_right_table_is_no_fault(dataset: Dataset, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """A push may have chosen another configuration than the one that the manifest's request names."""
    write_table(dataset.folder, change)
    assert dataset.verify(model_folder=None).ok


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (make_stale, f"lists {MANIFEST} as it is not there"),
        (
            lambda rows: rows[0].update(captured_at="2000-01-01T00:00:00Z"),
            f"says other things of {MANIFEST} than it does itself: captured_at",
        ),
        (
            lambda rows: rows[0].update(manifest_git_oid="0" * 40),
            f"says other things of {MANIFEST} than it does itself: manifest_git_oid",
        ),
    ],
)
def test_a_row_that_is_not_of_a_manifest_that_is_there_is_named(
    dataset: Dataset, change: Callable[[list[dict[str, Any]]], None], what: str
) -> None:
    write_table(dataset.folder, change)
    assert said(dataset.verify(model_folder=None)) == f"{JOBS_PATH}: {what}"


@pytest.mark.parametrize("content", [b"not json", b"[]", b"\xff", b'{"jobs": [{}]}'])
def test_what_is_no_table_is_named(dataset: Dataset, content: bytes) -> None:
    (dataset.folder / JOBS_PATH).write_bytes(content)
    assert said(dataset.verify(model_folder=None)).startswith(
        f"{JOBS_PATH}: is not a table of this version: "
    )


def test_a_table_that_no_push_would_read_is_named(dataset: Dataset) -> None:
    write_table(dataset.folder)
    os.truncate(dataset.folder / JOBS_PATH, MAX_TABLE_BYTES + 1)
    told = f"{JOBS_PATH}: has {MAX_TABLE_BYTES + 1} bytes"
    assert said(dataset.verify(model_folder=None)).startswith(told)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (add_one_that_is_gone, f"lists manifests/{GONE}.json, which is not there"),
        (lambda rows: rows.clear(), f"does not list {MANIFEST} as it is there"),
    ],
)
def test_a_table_of_other_jobs_is_a_fault_of_a_repository_alone(
    dataset: Dataset, change: Callable[[list[dict[str, Any]]], None], what: str
) -> None:
    """A folder may hold some of the jobs, or those of several; what pushes it writes another table."""
    write_table(dataset.folder, change)
    assert dataset.verify(model_folder=None).ok
    paths = [path for path in dataset.folder.rglob("*") if path.is_file()]
    tree = {path.relative_to(dataset.folder).as_posix(): path.read_bytes() for path in paths}
    with FakeHub() as hub:
        hub.add_repo("org/states", tree)
        report = verify_dataset(HubFiles("org/states", endpoint=hub.url))
    assert said(report) == f"{JOBS_PATH}: {what}"


def test_a_manifest_that_was_lost_from_a_folder_is_named_where_files_of_its_job_are(dataset: Dataset) -> None:
    write_table(dataset.folder, add_one_that_is_gone)
    (dataset.folder / shard_path(GONE, 0)).parent.mkdir()
    (dataset.folder / shard_path(GONE, 0)).write_bytes(b"x")
    report = dataset.verify(model_folder=None)
    assert said(report) == f"{JOBS_PATH}: lists manifests/{GONE}.json, which is not there"
    assert report.not_complete == (GONE,)


def test_a_job_that_is_published_while_the_manifests_are_read_is_no_fault(dataset: Dataset) -> None:
    class Published(LocalFiles):
        def open(self, path: str, *, direct: bool = False) -> LocalFile:
            """Let the other job's manifest and row come after the manifests were listed."""
            if path == JOBS_PATH:
                (dataset.folder / manifest_path(GONE)).write_text("{}")
                write_table(dataset.folder, add_one_that_is_gone)
            return super().open(path, direct=direct)

    write_table(dataset.folder)
    (dataset.folder / shard_path(GONE, 0)).parent.mkdir()
    (dataset.folder / shard_path(GONE, 0)).write_bytes(b"x")
    report = verify_dataset(Published(dataset.folder))
    assert report.ok, said(report)


def test_a_manifest_that_cannot_be_read_is_named_with_its_row(dataset: Dataset) -> None:
    write_table(dataset.folder)
    (dataset.folder / MANIFEST).write_text("{")
    assert f"{JOBS_PATH}: lists {MANIFEST} as it is not there" in said(dataset.verify(model_folder=None))
