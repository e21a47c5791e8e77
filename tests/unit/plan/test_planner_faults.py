"""What a planner meets that nobody foresaw ends its job with a word; what is known is named with a cure."""

import errno
import gzip
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.identity import Identity
from schemas.job import JobState
from schemas.request import ExtractRequest, FileSource, Sample
from service.errors import DiskFull, HubUnavailable, QuarryError, SourceRefused
from service.plan.estimate import estimate_request
from service.plan.hub_reading import reading_hub
from service.plan.sources import RejectReason, RowReject, SourceRow, open_source
from service.plan.target import inspect_target
from service.settings import Settings
from service.store import PlanLease, Store
from tests.support.fake_hub import FakeHub
from tests.support.store_cases import Clock
from tests.unit.plan.test_planner import JOB, House


class BuggyStore(Store):
    """A store with a bug, which is told as `said`."""

    said = "nobody foresaw this"

    def set_identity(self, lease: PlanLease, identity: Identity) -> None:
        raise KeyError(self.said)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path, Clock())
    yield made
    made.store.close()


def read(root: Path, path: str) -> list[SourceRow]:
    source = FileSource(kind="file", path=path)
    return list(open_source(source, Settings(source_roots=(root,))).rows())


def refusal(root: Path, path: str) -> SourceRefused:
    with pytest.raises(SourceRefused) as caught:
        read(root, path)
    assert caught.value.field == "source.path" and caught.value.cure
    assert caught.value.problem().model_dump_json()
    return caught.value


@pytest.mark.parametrize("said", ["nobody foresaw this", "\ud800 " + "x" * 10_000])
def test_a_bug_fails_the_job_with_a_word_and_the_planner_goes_on(
    house: House, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """1. planning raises what is no QuarryError  2. the job says so, the log has the traceback.

    3. without the bug the job is resumed, and planned by the same planner.
    """
    buggy = BuggyStore(house.settings.database(), house.clock)
    buggy.said = said
    good, house.store = house.store, buggy
    house.submit()
    with caplog.at_level(logging.ERROR, "service.plan.planner"):
        assert house.plan() is True
    buggy.close()
    house.store = good
    job = good.job(JOB)
    assert job.state is JobState.FAILED and job.problem is not None
    assert (job.problem.title, job.problem.status) == ("Internal error", 500)
    told = job.problem.detail
    assert told.startswith("internal error: KeyError(") and ascii(said)[:10] in told
    assert len(told) < 1000 and job.problem.cure
    [record] = [entry for entry in caplog.records if entry.exc_info]
    assert record.exc_info is not None and record.exc_info[0] is KeyError and JOB in record.getMessage()
    good.resume(JOB)
    assert house.plan() is True
    assert good.job(JOB).progress.plan_done


def text_of(*values: bytes | None) -> pa.Array:
    """Return a column that says it is text, of any bytes."""
    return pa.array(values, pa.binary()).view(pa.string())


def test_a_row_whose_bytes_are_no_text_is_a_reject_and_its_neighbours_are_read(tmp_path: Path) -> None:
    ids, texts = text_of(b"a", b"b", b"\xff", b"d", None), text_of(b"x", b"\xff", b"y", b"z", b"\xfe\xff")
    pq.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "a.parquet")
    found = read(tmp_path, "a.parquet")
    assert [row.source_id for row in found] == ["a", "b", "a.parquet:2", "d", "a.parquet:4"]
    assert (found[0].content, found[3].content) == (Sample(id="a", text="x"), Sample(id="d", text="z"))
    for at in (1, 2, 4):
        bad = found[at].content
        assert isinstance(bad, RowReject) and bad.reason is RejectReason.INVALID_SAMPLE
        assert "utf-8" in bad.detail


def test_a_date_that_python_has_none_for_costs_its_row_alone(tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("at", pa.timestamp("s"))])
    rows = [[{"role": "user", "content": "x", "at": at}] for at in (0, 10**15, 1)]
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(turn))}), tmp_path / "a.parquet")
    contents = [row.content for row in read(tmp_path, "a.parquet")]
    assert [isinstance(content, Sample) for content in contents] == [True, False, True]
    assert isinstance(contents[1], RowReject) and contents[1].reason is RejectReason.INVALID_SAMPLE


def test_a_column_whose_name_is_no_text_is_refused_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"], "qqqq": ["y"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"qqqq", b"\xff\xfe\xff\xfe"))
    assert "'a.parquet' cannot be read" in refusal(tmp_path, "a.parquet").detail


@pytest.fixture
def nameless(tmp_path: Path) -> Path:
    """Return a folder with a file whose name is no UTF-8."""
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "x"}\n')
    (folder / os.fsdecode(b"b\xff.jsonl")).write_text('{"text": "y"}\n')
    return folder


def test_a_file_whose_name_is_no_text_is_refused_by_name(tmp_path: Path, nameless: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(nameless / os.fsdecode(b"b\xff.jsonl"))
    for path in ("d", "link.jsonl"):
        error = refusal(tmp_path, path)
        assert "b\\udcff.jsonl" in error.detail and "UTF-8" in error.detail and "rename" in str(error.cure)


def test_a_file_whose_name_is_no_text_fails_the_job_and_its_estimate_alike(
    house: House, nameless: Path
) -> None:
    house.submit(source={"kind": "file", "path": str(nameless)})
    assert house.plan() is True
    job = house.store.job(JOB)
    assert job.state is JobState.FAILED and job.problem is not None
    assert (job.problem.type, job.problem.field) == ("urn:quarry:source-refused", "source.path")
    with pytest.raises(SourceRefused):
        estimate_request(job.request, house.settings)


def test_a_path_that_cannot_be_looked_up_is_refused(tmp_path: Path) -> None:
    (tmp_path / "round.jsonl").symlink_to(tmp_path / "round.jsonl")
    for path in ("x" * 300 + ".jsonl", "round.jsonl"):
        assert "cannot be found" in refusal(tmp_path, path).detail


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/blob"), DiskFull),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), DiskFull),
        (OSError(errno.EIO, os.strerror(errno.EIO)), HubUnavailable),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), HubUnavailable),
        (OSError("the file's length is another"), HubUnavailable),
        (ConnectionResetError(), HubUnavailable),
        (FileNotFoundError("no data files"), SourceRefused),
        (gzip.BadGzipFile("not a gzipped file"), SourceRefused),
        (EOFError("the file ends early"), SourceRefused),
        (zlib.error("invalid block type"), SourceRefused),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), SourceRefused),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_what_breaks_while_the_hub_is_read_has_its_own_error(
    raised: Exception, expected: type[QuarryError]
) -> None:
    with (
        pytest.raises(QuarryError) as caught,
        reading_hub("dataset 'org/set'", SourceRefused, "source.repo_id", "check the id"),
    ):
        raise raised
    assert type(caught.value) is expected
    assert caught.value.field == "source.repo_id" and "dataset 'org/set'" in caught.value.detail
    if expected is not HubUnavailable:
        assert caught.value.cure
    assert "/cache" not in caught.value.detail


def test_a_cache_that_cannot_be_written_is_not_the_models_fault(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    body: dict[str, Any] = {
        "model": "org/model",
        "source": {"kind": "inline", "samples": [{"text": "x"}]},
    }
    with FakeHub() as hub:
        files = {path.name: path.read_bytes() for path in house.model.iterdir()}
        hub.add_repo("org/model", files, kind="model")
        with pytest.raises(HubUnavailable) as caught:
            inspect_target(ExtractRequest.model_validate(body), Settings(hub_endpoint=hub.url))
    assert caught.value.field == "model"
