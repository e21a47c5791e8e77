"""`--part` of a job's file: what it sets, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.request import Part
from service.cli.job_file import read_job_file
from tests.support import templates
from tests.support.api import job_body
from tests.unit.cli.conftest import Run


def write_job(folder: Path, **changes: Any) -> Path:
    body = job_body(templates.write_target(folder / "model"), **changes)
    (folder / "job.json").write_text(json.dumps(body))
    return folder / "job.json"


def test_an_estimate_counts_the_part_that_is_named(run: Run, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    told = [json.loads(run("estimate", job, "--part", part, "--json").out) for part in ("1/2", "2/2", "3/3")]
    assert [estimate["samples"] for estimate in told] == [1, 1, 0]
    assert told[1]["tokens"] == 3


@pytest.mark.parametrize("verb", [["estimate"], ["extract", "--out", "out"]])
def test_a_part_beside_another_one_in_the_file_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = write_job(tmp_path, part={"index": 2, "of": 2})
    ran = run(*verb, job, "--part", "1/2")
    assert (ran.code, "field: --part" in ran.err, "cure:" in ran.err) == (2, True, True)
    assert read_job_file(job, Part(index=2, of=2)) == read_job_file(job)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["3", "0/4", "5/4", "-1/4", "1/4/9", "a/b", "/16"])
def test_what_is_no_part_is_wrong_usage(run: Run, tmp_path: Path, part: str) -> None:
    ran = run("estimate", write_job(tmp_path), "--part", part)
    assert (ran.code, "a part is given as 3/16" in ran.err) == (2, True)


def test_a_part_of_a_shuffled_source_is_refused_where_it_is_named(run: Run, tmp_path: Path) -> None:
    source = {"kind": "inline", "samples": [{"text": "one"}, {"text": "two"}], "seed": 7}
    ran = run("estimate", write_job(tmp_path, source=source), "--part", "1/2")
    assert (ran.code, "'source.seed' goes without 'part'" in ran.err) == (2, True)
