"""Parts of a source: each row is in exactly one, under its own place, whatever the source is."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.request import ExtractRequest, Part
from schemas.schedule import NewSchedule
from service.plan.child.process import tokenizing
from service.plan.child.task import Purpose, Task
from service.plan.estimate import estimate_request
from service.plan.model_folder import weight_roots_of
from service.plan.sources import RowReject, open_source
from service.plan.target import fetch_target
from service.plan.units import RowOutcome, sample_digest
from service.settings import Settings
from service.store import commits
from tests.support import templates
from tests.support.store_cases import Clock
from tests.unit.plan.house import JOB, House, chat


def part(index: int, of: int) -> dict[str, int]:
    return {"index": index, "of": of}


def a_request(root: Path, source: dict[str, Any], **options: Any) -> ExtractRequest:
    body = {"model": str(root / "model"), "layers": [2], "source": source} | options
    return ExtractRequest.model_validate(body)


def outcomes(request: ExtractRequest, settings: Settings) -> list[RowOutcome]:
    located = fetch_target(request, settings)
    source = open_source(request.source, settings)
    task = Task(Purpose.ESTIMATE, request, located, settings.model_roots, weight_roots_of(settings), source)
    with tokenizing(task, settings, lambda: None) as child:
        child.opening()
        return list(child.rows())


def ends(rows: list[RowOutcome]) -> dict[int, tuple[str, object]]:
    """Return what became of each row by its place: its id, and its digest or why it was rejected."""
    return {
        row.position: (
            row.source_id,
            row.result if isinstance(row.result, RowReject) else sample_digest(row.source_id, row.result),
        )
        for row in rows
        if row.result is not None
    }


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Eleven rows of each kind of source, some of them bad; the mix has more."""
    templates.write_target(tmp_path / "model")
    rows = [{"messages": chat(f"row {i}")} if i % 4 != 3 else {"id": f"bad-{i}"} for i in range(11)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = {"kind": "file", "path": str(tmp_path / "rows.jsonl")}
    weighed = [{"source": file, "weight": 2}, {"source": file | {"limit": 4}, "weight": 1}]
    return {
        "file": file,
        "inline": {"kind": "inline", "samples": [{"text": f"row {i}"} for i in range(11)]},
        "mix": {"kind": "mix", "sources": weighed},
    }


@pytest.mark.parametrize("kind", ["file", "inline", "mix"])
@pytest.mark.parametrize("of", [1, 4, 20])
def test_every_row_is_in_exactly_one_part_under_its_own_place(
    tmp_path: Path, sources: dict[str, dict[str, Any]], kind: str, of: int
) -> None:
    settings = Settings(model_roots=(tmp_path,), source_roots=(tmp_path,))
    whole = ends(outcomes(a_request(tmp_path, sources[kind]), settings))
    shares = [
        ends(outcomes(a_request(tmp_path, sources[kind], part=part(index, of)), settings))
        for index in range(1, of + 1)
    ]
    assert list(whole) == list(range(len(whole))) and len(whole) >= 11
    assert [list(share) for share in shares] == [list(whole)[index::of] for index in range(of)]
    assert {place: end for share in shares for place, end in share.items()} == whole


def test_a_part_counts_its_own_rows_alone_and_is_a_dataset_of_its_own(house: House, tmp_path: Path) -> None:
    """Of twelve rows the bad ones are 3, 7 and 11: the fourth part of four holds nothing else."""
    house.submit(part=part(2, 3))
    house.plan()
    progress = house.job().progress
    assert (progress.samples_planned, progress.samples_rejected, progress.plan_done) == (4, 1, True)
    assert [reject.position for reject in house.store.read(commits.rejects, JOB)] == [7]
    identity = house.job().identity
    whole = House(tmp_path / "whole", Clock())
    whole.submit()
    whole.plan()
    other = whole.job().identity
    whole.store.close()
    assert identity is not None and other is not None
    assert identity.differences(other) == ["part"] and identity.sha256() != other.sha256()
    assert identity.recipe_sha256() == other.recipe_sha256()
    assert "part 2/3" in identity.recipe() and "part" not in other.model_dump()


def test_a_part_beyond_the_last_row_is_planned_without_rows_but_an_empty_source_is_refused(
    house: House, tmp_path: Path
) -> None:
    house.write_rows(2)
    house.submit(part=part(3, 3))
    house.plan()
    job = house.job()
    assert job.progress.plan_done and job.problem is None
    assert (job.progress.samples_planned, job.progress.units_planned) == (0, 0)
    empty = House(tmp_path / "empty", Clock())
    empty.write_rows(0)
    empty.submit(part=part(1, 3))
    empty.plan()
    problem = empty.job().problem
    empty.store.close()
    assert empty.source.exists() and problem is not None
    assert (problem.type, problem.field) == ("urn:quarry:source-refused", "source.path")


def test_an_estimate_is_of_the_part(tmp_path: Path, sources: dict[str, dict[str, Any]]) -> None:
    settings = Settings(data_dir=tmp_path, model_roots=(tmp_path,), source_roots=(tmp_path,))
    requests = [a_request(tmp_path, sources["file"], part=part(index, 2)) for index in (1, 2)]
    odd, even = (estimate_request(request, settings) for request in requests)
    whole = estimate_request(a_request(tmp_path, sources["file"]), settings)
    assert (odd.samples, odd.rejected, even.samples, even.rejected) == (6, 0, 3, 2)
    assert odd.tokens + even.tokens == whole.tokens


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (part(0, 4), "index"),
        (part(5, 4), "there is no part 5/4: the last is 4/4"),
        (part(1, 10_001), "of"),
        ({"index": "1", "of": 2}, "index"),
        ("1/2", "Part"),
    ],
    ids=str,
)
def test_a_bad_part_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Part.model_validate(wrong)


def test_a_schedule_has_no_part(sources: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    request = a_request(tmp_path, sources["file"], part=part(1, 2))
    with pytest.raises(ValidationError, match="a schedule has no 'part'"):
        NewSchedule(name="nightly", cron="0 3 * * *", request=request)


def test_the_digest_of_a_job_without_a_part_knows_of_none(tmp_path: Path) -> None:
    """So its id and its dataset's are those of before there were parts."""
    request = a_request(tmp_path, {"kind": "inline", "samples": [{"text": "x"}]})
    assert "part" not in request.canonical_json()
    in_part = request.model_copy(update={"part": Part(index=2, of=3)})
    assert ExtractRequest.model_validate_json(in_part.canonical_json()) == in_part
    assert in_part.published().model_extra["part"] == part(2, 3)
