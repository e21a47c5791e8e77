"""Which jobs are read since a day or a time: what manifests say, and of a repository the table of jobs."""

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from schemas.names import JOBS_PATH, manifest_path
from service.artifacts.dataset_files import SMALL_BYTES, HubFiles, LocalFiles
from service.reader.errors import ReaderError
from service.reader.jobs import read_jobs
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import CAPTURED_AT, a_dataset

NIGHTS = [f"j-{number:016x}" for number in range(3)]
LAST = CAPTURED_AT + timedelta(days=2)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three nights: 1, 2 and 3 November 2026, at 03:30 UTC."""
    folder = tmp_path_factory.mktemp("nights")
    for number, job_id in enumerate(NIGHTS):
        a_dataset(folder, job_id, num_units=1, captured_at=CAPTURED_AT + timedelta(days=number))
    return folder


@pytest.fixture
def copied(repository: Path, tmp_path: Path) -> Path:
    """The same with files that may be changed; its rows are not needed."""
    for path in [*repository.glob("manifests/*"), repository / JOBS_PATH]:
        copy = tmp_path / path.relative_to(repository)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path


def nights(folder: Path, since: Any, jobs: list[str] | None = None) -> list[int]:
    """Return the numbers of the nights that are read."""
    wanted = frozenset(jobs) if jobs is not None else None
    return [NIGHTS.index(job) for job in read_jobs(LocalFiles(folder), wanted, since)]


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        (None, [0, 1, 2]),
        ("2026-11-01", [0, 1, 2]),
        (date(2026, 11, 2), [1, 2]),
        ("2026-11-03", [2]),
        ("2026-11-03T04:30:00+01:00", [2]),
        (LAST, [2]),
        (datetime(2026, 11, 2, 3, 31, tzinfo=UTC), [2]),
    ],
)
def test_jobs_are_read_since_a_day_or_a_time(repository: Path, since: Any, expected: list[int]) -> None:
    assert nights(repository, since) == expected


def test_jobs_that_are_named_are_filtered_too(repository: Path) -> None:
    assert nights(repository, "2026-11-02", NIGHTS[:2]) == [1]


def test_where_nothing_is_new_the_newest_job_is_named(repository: Path) -> None:
    with pytest.raises(ReaderError, match="since 2026-11-04 00:00 UTC: the newest is of 2026-11-03 03:30"):
        nights(repository, "2026-11-04")


@pytest.mark.parametrize("since", ["yesterday", "2026-11-01T03:00", datetime(2026, 11, 1, 3)])
def test_a_time_that_could_be_another_is_refused(repository: Path, since: Any) -> None:
    with pytest.raises(ReaderError, match="neither a day, such as 2026-11-01, nor a time with its offset"):
        nights(repository, since)


def of_other_manifests(table: bytes) -> bytes:
    """Every row is of a file that is not there any more, and names an earlier night."""
    document = json.loads(table)
    for row in document["jobs"]:
        row["manifest"]["sha256"], row["manifest_git_oid"] = "0" * 64, "0" * 40
        row["captured_at"] = "2026-10-01T03:30:00Z"
    return json.dumps(document).encode()


TABLES: dict[str, Callable[[bytes], bytes | None]] = {
    "right": lambda table: table,
    "none": lambda _: None,
    "cut off": lambda _: b"{",
    "other fields": lambda _: b'{"jobs": [], "new": 1}',
    "of no job": lambda _: b'{"jobs": []}',
    "of other manifests": of_other_manifests,
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES)
def test_what_the_table_does_not_say_of_the_manifests_that_are_there_they_say(
    copied: Path, change: Callable[[bytes], bytes | None]
) -> None:
    """In a folder, and in a repository, where as many manifests are read as the table leaves to say."""
    table = change((copied / JOBS_PATH).read_bytes())
    (copied / JOBS_PATH).unlink()
    if table is not None:
        (copied / JOBS_PATH).write_bytes(table)
    assert nights(copied, "2026-11-02") == [1, 2]
    tree = {path.relative_to(copied).as_posix(): path.read_bytes() for path in copied.rglob("*.json")}
    with FakeHub() as hub:
        hub.add_repo("org/nights", tree)
        files = HubFiles("org/nights", endpoint=hub.url)
        assert list(read_jobs(files, None, "2026-11-03")) == NIGHTS[2:]
        assert (manifest_path(NIGHTS[0]) in hub.paths_read) == (change is not TABLES["right"])


def test_a_manifest_of_many_shards_and_rejects_is_read(copied: Path) -> None:
    """It may be longer than any other small file of a dataset."""
    with (copied / manifest_path(NIGHTS[0])).open("ab") as manifest:
        manifest.write(b" " * SMALL_BYTES)
    assert nights(copied, None) == [0, 1, 2]
