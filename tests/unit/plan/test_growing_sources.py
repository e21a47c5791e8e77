"""Folders and globs into which others write, and several sources in one."""

import json
import os
import shutil
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from schemas.source import Sample
from service.errors import SourceRefused
from service.plan.sources import RowSource, SourceRow, open_source
from service.plan.sources.mix import interleaved
from service.settings import Settings
from tests.unit.plan.test_sources import SOURCE, opened


def ids(source: RowSource) -> list[str]:
    return [row.source_id for row in source.rows()]


def drop(path: Path, rows: int = 1) -> Path:
    """Write a file of so many rows, as its producer would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{path.name} {number}"}) + "\n" for number in range(rows)))
    return path


def test_a_glob_takes_the_files_that_match_in_name_order(tmp_path: Path) -> None:
    for name in ("day-2/b.jsonl", "day-1/a.jsonl", "day-1/a.txt", "other/c.jsonl", "day-1/.hidden.jsonl"):
        drop(tmp_path / "in" / name)
    source = {"kind": "file", "path": str(tmp_path / "in" / "day-*" / "*")}
    assert ids(opened(tmp_path, source)) == ["day-1/a.jsonl:0", "day-2/b.jsonl:0"]
    deep = {"kind": "file", "path": str(tmp_path / "**" / "c.jsonl")}
    assert ids(opened(tmp_path, deep)) == ["in/other/c.jsonl:0"]


@pytest.mark.parametrize("path", ["*/b.jsonl", "in/b*", "in/b.jsonl"])
def test_a_relative_path_is_found_below_each_root(tmp_path: Path, path: str) -> None:
    drop(tmp_path / "one" / "in" / "a.jsonl")
    drop(tmp_path / "two" / "in" / "b.jsonl")
    source = SOURCE.validate_python({"kind": "file", "path": path})
    settings = Settings(source_roots=(tmp_path / "one", tmp_path / "two"))
    assert len(ids(open_source(source, settings).listed())) == 1


@pytest.mark.parametrize("path", ["in", "in/*.jsonl", "*/b.jsonl", "**/*.jsonl"])
def test_a_plan_made_again_finds_its_files_in_their_root_whatever_came_into_an_earlier_one(
    tmp_path: Path, path: str
) -> None:
    drop(tmp_path / "two" / "in" / "b.jsonl")
    source = SOURCE.validate_python({"kind": "file", "path": path})
    settings = Settings(source_roots=(tmp_path / "one", tmp_path / "two"))
    planned = open_source(source, settings).listed()
    drop(tmp_path / "one" / "in" / "a.jsonl")
    came = drop(tmp_path / "one" / "in" / "b.jsonl", rows=2)
    (tmp_path / "two" / "in" / "elsewhere").symlink_to(tmp_path)  # refused in a new plan
    again = open_source(source, settings, planned.frozen()).listed()
    assert again.fingerprint() == planned.fingerprint() and ids(again) == ids(planned)
    assert again.frozen() == planned.frozen()
    (tmp_path / "two" / "in" / "b.jsonl").unlink()
    came.unlink()
    with pytest.raises(SourceRefused, match="is gone since"):
        open_source(source, settings, planned.frozen()).listed()


def test_a_name_that_looks_like_a_glob_is_a_name_where_it_is_there(tmp_path: Path) -> None:
    drop(tmp_path / "[a].jsonl")
    drop(tmp_path / "a.jsonl")
    assert ids(opened(tmp_path, {"kind": "file", "path": "[a].jsonl"})) == ["[a].jsonl:0"]


@pytest.mark.parametrize(
    "path", ["../*/out.jsonl", "in/../../*/out.jsonl", "in/*/../../../out.jsonl", "in/li*"]
)
def test_no_glob_leads_out_of_the_roots(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    drop(root / "in" / "sub" / "a.jsonl")
    drop(tmp_path / "out.jsonl")
    drop(tmp_path / "secret" / "out.jsonl")
    (root / "in" / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    with pytest.raises(SourceRefused, match=r"not inside|behind a wildcard") as caught:
        opened(root, {"kind": "file", "path": str(root / path)})
    assert "secret" not in caught.value.detail


@pytest.mark.parametrize("path", ["**/**/*.jsonl", "**/in/**/*.jsonl", "in/*/../*.jsonl", "a**/b.jsonl"])
def test_a_glob_that_walks_more_than_once_or_back_is_refused_before_it_is_walked(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    drop(tmp_path / "in" / "a.jsonl")
    with pytest.raises(SourceRefused, match="behind a wildcard") as caught:
        opened(tmp_path, {"kind": "file", "path": str(tmp_path / path)})
    assert caught.value.field == "source.path" and caught.value.cure


def test_a_young_file_and_one_without_its_marker_wait(tmp_path: Path) -> None:
    old, young = drop(tmp_path / "old.jsonl"), drop(tmp_path / "young.jsonl")
    os.utime(old, (time.time() - 600,) * 2)
    source = {"kind": "file", "path": str(tmp_path), "min_age_s": 300}
    assert ids(opened(tmp_path, source)) == ["old.jsonl:0"]
    marked = {"kind": "file", "path": str(tmp_path), "marker": ".done"}
    with pytest.raises(SourceRefused, match="is complete yet"):
        opened(tmp_path, marked)
    assert ids(opened(tmp_path, marked, may_be_empty=True)) == []
    young.with_name("young.jsonl.done").touch()
    assert ids(opened(tmp_path, marked)) == ["young.jsonl:0"]


def test_a_file_whose_time_is_in_the_future_waits_no_longer_than_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now = drop(tmp_path / "copied.jsonl"), time.time()
    os.utime(file, (now + 1e9,) * 2)
    source = {"kind": "file", "path": str(tmp_path), "min_age_s": 300}
    assert ids(opened(tmp_path, source, may_be_empty=True)) == []
    monkeypatch.setattr(time, "time", lambda: now + 600)
    assert ids(opened(tmp_path, source)) == ["copied.jsonl:0"]


@pytest.mark.parametrize("path", [".", "**/*.jsonl"])
def test_what_spark_has_not_committed_is_not_there(tmp_path: Path, path: str) -> None:
    drop(tmp_path / "_temporary" / "0" / "part-0.jsonl")
    drop(tmp_path / "part-0.jsonl")
    assert ids(opened(tmp_path, {"kind": "file", "path": path})) == ["part-0.jsonl:0"]


@pytest.mark.parametrize("path", [".", "*.jsonl"])
def test_a_source_that_is_frozen_does_not_grow(tmp_path: Path, path: str) -> None:
    drop(tmp_path / "b.jsonl")
    source = {"kind": "file", "path": path, "min_age_s": 0}
    first = opened(tmp_path, source)
    frozen = json.loads(json.dumps(first.frozen()))
    drop(tmp_path / "a.jsonl")
    (tmp_path / "_delta_log").mkdir()
    again = opened(tmp_path, source, frozen)
    assert ids(again) == ["b.jsonl:0"] and again.fingerprint() == first.fingerprint()
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(SourceRefused, match="is gone since the job was planned"):
        opened(tmp_path, source, frozen)


@pytest.mark.parametrize("path", ["latest.jsonl", "latest", "latest/*.jsonl", "in/*.jsonl"])
def test_a_plan_made_again_reads_its_files_although_their_link_leads_to_newer_ones(
    tmp_path: Path, path: str
) -> None:
    links = {name: tmp_path / name for name in ("latest.jsonl", "latest", "in/latest.jsonl")}
    (tmp_path / "in").mkdir()

    def lead_to(day: str) -> None:
        file = drop(tmp_path / day / "a.jsonl", rows=len(day))
        for name, link in links.items():
            link.unlink(missing_ok=True)
            link.symlink_to(file if name.endswith(".jsonl") else file.parent)

    lead_to("day-9")
    first = opened(tmp_path, {"kind": "file", "path": path})
    frozen = json.loads(json.dumps(first.frozen()))
    lead_to("day-10")
    again = opened(tmp_path, {"kind": "file", "path": path}, frozen)
    assert again.fingerprint() == first.fingerprint() and ids(again) == ids(first)


def test_a_plan_made_again_finds_its_files_where_all_were_moved(tmp_path: Path) -> None:
    drop(tmp_path / "one" / "in" / "a.jsonl")
    source = {"kind": "file", "path": "in"}
    first = opened(tmp_path / "one", source)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for frozen in (first.frozen(), ["a.jsonl"]):  # as earlier builds wrote it
        again = opened(tmp_path / "two", source, frozen)
        assert again.fingerprint() == first.fingerprint() and ids(again) == ids(first)


def mix(*parts: dict[str, Any] | tuple[dict[str, Any], float]) -> dict[str, Any]:
    whole = [part if isinstance(part, tuple) else (part, None) for part in parts]
    return {"kind": "mix", "sources": [{"source": source, "weight": weight} for source, weight in whole]}


def file(name: str, **options: Any) -> dict[str, Any]:
    return {"kind": "file", "path": name} | options


def test_sources_without_weights_come_one_after_another_within_their_limits(tmp_path: Path) -> None:
    drop(tmp_path / "a.jsonl", 9)
    drop(tmp_path / "b.jsonl", 2)
    source = opened(tmp_path, mix(file("a.jsonl", limit=2), file("b.jsonl")))
    assert ids(source) == ["0/a.jsonl:0", "0/a.jsonl:1", "1/b.jsonl:0", "1/b.jsonl:1"]


def test_sources_with_weights_are_interleaved_until_one_ends(tmp_path: Path) -> None:
    drop(tmp_path / "a.jsonl", 100)
    drop(tmp_path / "b.jsonl", 4)
    taken = ids(opened(tmp_path, mix((file("a.jsonl"), 3), (file("b.jsonl"), 1))))
    assert Counter(name[0] for name in taken)["1"] == 4
    assert Counter(name[0] for name in taken[:16]) == {"0": 12, "1": 4}
    assert len(taken) <= 16 + 3


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 200))
def test_every_source_has_its_share_of_the_rows_so_far(weights: list[int], rows: int) -> None:
    parts = [iter([SourceRow(str(number), Sample(text="x"))] * rows) for number in range(len(weights))]
    taken = [int(row.source_id) for row in interleaved(parts, tuple(map(float, weights)))]
    for length in range(1, len(taken) + 1):
        counts = Counter(taken[:length])
        for number, weight in enumerate(weights):
            assert abs(counts[number] - Fraction(length * weight, sum(weights))) < len(weights)
    assert max(Counter(taken).values()) == rows


def test_a_mix_says_which_of_its_sources_is_wrong(tmp_path: Path) -> None:
    drop(tmp_path / "a.jsonl")
    with pytest.raises(SourceRefused) as caught:
        opened(tmp_path, mix(file("a.jsonl"), file("b.jsonl")))
    assert caught.value.field == "source.sources.1.source.path"
    with pytest.raises(ValidationError, match="every source a 'weight', or none"):
        opened(tmp_path, mix((file("a.jsonl"), 1), file("a.jsonl")))


def test_a_mix_changes_with_its_parts_and_its_weights_and_is_frozen_in_all_of_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        drop(tmp_path / name / "1.jsonl")
    plain, weighed = mix(file("a"), file("b")), mix((file("a"), 1), (file("b"), 2))
    first = opened(tmp_path, plain)
    assert opened(tmp_path, weighed).fingerprint() != first.fingerprint()
    drop(tmp_path / "b" / "2.jsonl")
    assert opened(tmp_path, plain).fingerprint() != first.fingerprint()
    again = opened(tmp_path, plain, json.loads(json.dumps(first.frozen())))
    assert again.fingerprint() == first.fingerprint() and ids(again) == ids(first)
