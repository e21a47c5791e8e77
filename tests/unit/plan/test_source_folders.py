"""Folders and globs as sources: which files are read, and which are refused, not passed over."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from schemas.source import Sample
from service.plan.sources import files
from tests.unit.plan.test_sources import jsonl, parquet, refusal, rows_of


def test_a_folder_is_read_in_name_order_and_other_files_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    jsonl(folder / "b.jsonl", {"text": "2"})
    parquet(folder / "a.parquet", [{"text": "1"}])
    jsonl(folder / "sub" / "c.jsonl", {"text": "3"})
    jsonl(folder / ".hidden" / "x.jsonl", {"text": "no"})
    (folder / "README.md").write_text("no")
    read = rows_of(tmp_path, "d")
    assert [row.source_id for row in read] == ["a.parquet:0", "b.jsonl:0", "sub/c.jsonl:0"]


def test_a_folder_that_may_not_be_read_is_refused_since_its_rows_would_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if Path(path).name == "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    # Who runs the tests may be root, to whom nothing is denied.
    monkeypatch.setattr(os, "scandir", denied)
    for path in (tmp_path, tmp_path / "**" / "*.jsonl"):
        assert "Permission denied" in refusal(tmp_path, path).detail


@pytest.mark.parametrize("path", [".", "**/*.jsonl", "d/*.jsonl"])
def test_a_link_that_leads_to_no_file_is_refused_since_its_rows_would_be_missing(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "d").mkdir()
    for name in ("d/a.jsonl", "d/b.jsonl.done", "d/c.jsonl.done"):
        jsonl(tmp_path / name, {"text": "x"})
    for name in ("d/b.jsonl", "d/of another form"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
    error = refusal(tmp_path, path)
    assert error.detail == "'b.jsonl' is a link that leads to no file" and "remove" in str(error.cure)
    assert refusal(tmp_path, path, marker=".done", min_age_s=1).detail == error.detail
    assert "no file" in refusal(tmp_path, path, marker=".ready").detail
    (tmp_path / "d/b.jsonl").unlink()
    assert [row.content for row in rows_of(tmp_path, path)] == [Sample(text="x")]


def test_a_file_that_goes_while_its_folder_is_listed_is_not_called_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = jsonl(tmp_path / "a.jsonl", {"text": "x"})

    def sorts_late(names: Collection[str]) -> list[str]:
        gone.unlink(missing_ok=True)
        return sorted(names)

    monkeypatch.setattr(files, "_readable", sorts_late)
    assert refusal(tmp_path, ".").detail == "'a.jsonl' is gone since its folder was listed"


@pytest.mark.parametrize(
    "log",
    [
        "_delta_log/0.json",
        ".hoodie/0.commit",
        "metadata/v1.metadata.json",
        "metadata/00000-9c1e.metadata.json",
    ],
)
def test_a_table_whose_log_says_which_files_count_is_refused(tmp_path: Path, log: str) -> None:
    (tmp_path / "in" / "table" / log).parent.mkdir(parents=True)
    (tmp_path / "in" / "table" / "day=1").mkdir()
    for name in ("in/table/old.jsonl", "in/table/day=1/old.jsonl", f"in/table/{log}"):
        jsonl(tmp_path / name, {"text": "x"})
    for path in ("in", "in/table", "in/table/day=1", "in/table/day=1/**/*.jsonl", "**/*.jsonl"):
        error = refusal(tmp_path, path)
        assert error.detail.startswith("'table' is ") and "glob" in str(error.cure)
    jsonl(tmp_path / "in/b.ndjson", {"text": "x"})
    for path in ("in/*/*.jsonl", "**/*.ndjson"):  # which name them, or leave the table out
        assert len(rows_of(tmp_path, path)) == 1


@pytest.mark.parametrize(
    "name", ["b.jsonl.zst", "b.json.gz", "b.json.snappy", "d/b.parquet.GZ", "b.jsonl.Z", "b.JSONL"]
)
def test_a_file_in_a_folder_that_is_read_only_in_another_form_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "d").mkdir()
    for file in ("a.jsonl", "a.jsonl.done", "a.jsonl.bak", "README.md"):
        jsonl(tmp_path / file, {"text": "x"})
    assert len(rows_of(tmp_path, tmp_path)) == 1
    jsonl(tmp_path / name, {"text": "y"})
    assert refusal(tmp_path, tmp_path).detail.startswith(f"{name!r} is not read")
    assert len(rows_of(tmp_path, tmp_path / "*.jsonl")) == 1


def test_metadata_of_other_kinds_beside_a_folder_do_not_make_it_a_table(tmp_path: Path) -> None:
    for name in ("in/metadata/a.metadata.json", "in/day=1/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        jsonl(tmp_path / name, {"text": "x"})
    assert len(rows_of(tmp_path, "in/day=1")) == len(rows_of(tmp_path, "in/**/*.jsonl")) == 1


@pytest.mark.parametrize("path", [".", "*/*.jsonl", "*/**/*.jsonl", "**/*.jsonl"])
def test_a_link_to_a_file_that_is_read_under_its_own_name_does_not_give_its_rows_again(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "day-1").mkdir()
    jsonl(tmp_path / "day-1" / "a.jsonl", {"text": "x"})
    (tmp_path / "day-1" / "latest.jsonl").symlink_to("a.jsonl")
    (tmp_path / "latest").symlink_to("day-1")
    assert [row.source_id for row in rows_of(tmp_path, path)] == ["day-1/a.jsonl:0"]
    assert len(rows_of(tmp_path, "latest/latest.jsonl")) == len(rows_of(tmp_path, "latest/l*.jsonl")) == 1


def test_links_to_one_file_outside_of_the_folder_give_its_rows_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "out.jsonl", {"text": "x"})
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / "in" / name).symlink_to("../out.jsonl")
    assert [row.source_id for row in rows_of(tmp_path, "in")] == ["a.jsonl:0"]


def test_a_file_is_read_under_its_own_name_also_if_only_a_link_to_it_has_the_marker(tmp_path: Path) -> None:
    jsonl(tmp_path / "b.jsonl", {"text": "x"})
    (tmp_path / "a.jsonl").symlink_to("b.jsonl")
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / f"{name}.done").touch()
        assert [row.source_id for row in rows_of(tmp_path, ".", marker=".done")] == ["b.jsonl:0"]


@pytest.mark.parametrize("target", ["../out", "all/.hidden"])
def test_a_link_to_a_folder_that_is_not_read_otherwise_is_refused(tmp_path: Path, target: str) -> None:
    for folder in ("in/all/.hidden", "in/all/0", "out"):
        (tmp_path / folder).mkdir(parents=True)
        jsonl(tmp_path / folder / "a.jsonl", {"text": folder})
    root = tmp_path / "in"
    (root / "all" / "latest").symlink_to("0")  # the folder itself is read
    for path in (root, root / "**" / "*.jsonl"):
        assert [row.source_id for row in rows_of(tmp_path, path)] == ["all/0/a.jsonl:0"]
    (root / "link").symlink_to(root / target)
    for path in (root, root / "**" / "*.jsonl"):
        error = refusal(tmp_path, path)
        assert error.detail == "'link' is a link to a folder, which is not followed"
        assert "mix" in str(error.cure)


@pytest.mark.parametrize("path", ["*/secret.jsonl", "l*/*.jsonl", "l*/**/*.jsonl", "link", "*/none.jsonl"])
def test_a_link_out_of_the_roots_is_refused_without_the_names_that_are_there(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "others").mkdir()
    jsonl(tmp_path / "others" / "secret.jsonl", {"text": "x"})
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "link").symlink_to("../others")
    detail = refusal(tmp_path / "own", tmp_path / "own" / path).detail
    assert "not inside a folder that sources may be read from" in detail
    assert "link'" in detail, "the link is named, and nothing behind it"


@pytest.mark.parametrize("name", ["there.jsonl", "missing.jsonl"])
def test_a_link_out_of_the_roots_does_not_say_whether_its_file_is_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "others").mkdir()
    jsonl(tmp_path / "others" / "there.jsonl", {"text": "x"})
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.jsonl").symlink_to(tmp_path / "others" / name)
    detail = refusal(tmp_path / "own", tmp_path / "own").detail
    assert "a.jsonl' is not inside a folder that sources may be read from" in detail


@pytest.mark.parametrize("name", ["there.jsonl", "missing.jsonl"])
def test_a_marker_out_of_the_roots_does_not_say_whether_it_is_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "there.jsonl").touch()
    (tmp_path / "own").mkdir()
    jsonl(tmp_path / "own" / "a.jsonl", {"text": "x"})
    (tmp_path / "own" / "a.jsonl.done").symlink_to(tmp_path / "others" / name)
    detail = refusal(tmp_path / "own", tmp_path / "own", marker=".done").detail
    assert "a.jsonl.done' is not inside a folder that sources may be read from" in detail


def test_a_link_to_a_folder_that_a_globs_wildcard_names_is_passed_over(tmp_path: Path) -> None:
    for folder in ("a/x", "b/.hidden", "c"):
        (tmp_path / folder).mkdir(parents=True)
        jsonl(tmp_path / folder / "a.jsonl", {"text": folder})
    link = tmp_path / "a" / "x" / "link"
    link.symlink_to("../../c")
    assert [row.source_id for row in rows_of(tmp_path, "*/**/*.jsonl")] == ["a/x/a.jsonl:0", "c/a.jsonl:0"]
    assert "'x/link' is a link" in refusal(tmp_path, "[ab]/**/*.jsonl").detail
    link.unlink()
    link.symlink_to("../../b/.hidden")
    assert "'x/link' is a link" in refusal(tmp_path, "*/**/*.jsonl").detail
