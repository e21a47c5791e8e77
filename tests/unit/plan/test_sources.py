"""Sources: what is read, what is a reject, and what is refused."""

import gzip
import json
import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from schemas.keys import Grants, Scope
from schemas.source import Sample, Source
from service.errors import SourceRefused
from service.plan.sources import RejectReason, RowReject, RowSource, SourceRow, open_source
from service.settings import Settings

SOURCE: TypeAdapter[Any] = TypeAdapter(Source)


def opened(root: Path, source: dict[str, Any], *frozen: object, **options: Any) -> RowSource:
    """Open a source of files below the root; list it."""
    settings = Settings(source_roots=(root,))
    return open_source(SOURCE.validate_python(source), settings, *frozen, **options).listed()


def of_files(root: Path, path: str | Path, **options: Any) -> RowSource:
    return opened(root, {"kind": "file", "path": str(path)} | options)


def rows_of(root: Path, path: str | Path, **options: Any) -> list[SourceRow]:
    return list(of_files(root, path, **options).rows())


def refusal(root: Path, path: str | Path, **options: Any) -> SourceRefused:
    with pytest.raises(SourceRefused) as caught:
        rows_of(root, path, **options)
    assert caught.value.field == "source.path" and caught.value.cure
    return caught.value


def print_of(root: Path, path: str | Path, **options: Any) -> str:
    return of_files(root, path, **options).fingerprint()


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(sample: Sample | RowReject) -> list[dict[str, Any]]:
    assert isinstance(sample, Sample), sample
    return [message.for_template() for message in sample.messages or ()]


ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_inline_samples_are_numbered_and_keep_their_ids(tmp_path: Path) -> None:
    source = SOURCE.validate_python({"kind": "inline", "samples": [{"id": "a", "text": "x"}, {"text": "y"}]})
    read = open_source(source, Settings())
    assert [row.source_id for row in read.rows()] == ["a", "1"]
    assert read.fingerprint().startswith("inline:")


@pytest.mark.parametrize(
    ("given_id", "expected"), [("mine", "mine"), (5, "5"), ("\ud800", "a.jsonl:0"), ([], "a.jsonl:0")]
)
def test_a_reject_keeps_its_id_where_it_is_one(tmp_path: Path, given_id: Any, expected: str) -> None:
    jsonl(tmp_path / "a.jsonl", {"id": given_id, "question": "\ud800"})
    [row] = rows_of(tmp_path, "a.jsonl")
    assert isinstance(row.content, RowReject) and row.source_id == expected


def test_the_detail_of_a_reject_can_be_written_anywhere() -> None:
    assert RowReject(RejectReason.EMPTY, "\ud800" * 300).detail.encode().isascii()
    assert len(RowReject(RejectReason.EMPTY, "\ud800" * 300).detail) == 500


FIRST = Sample(text="x")
LINES: dict[str, tuple[bytes, list[tuple[str, Sample | RejectReason]]]] = {
    "blank and bad lines": (
        b'{"text": "x"}\n\n{"text": \n[1]\n{"id": "mine", "text": "y"}\n\xff\n{"text": "x"}',
        [
            ("a.jsonl:0", FIRST),
            ("a.jsonl:1", RejectReason.NOT_JSON),
            ("a.jsonl:2", RejectReason.NOT_AN_OBJECT),
            ("mine", Sample(id="mine", text="y")),
            ("a.jsonl:4", RejectReason.NOT_JSON),
            ("a.jsonl:5", FIRST),
        ],
    ),
    "a key comes twice": (
        b'{"text": "y", "text": "x"}\n{"messages": [{"role": "user", "content": "x", "role": "tool"}]}\n',
        [("a.jsonl:0", RejectReason.INVALID_SAMPLE), ("a.jsonl:1", RejectReason.INVALID_SAMPLE)],
    ),
    "nested without end": (
        b'{"text": "x"}\n' + b"[" * 200_000,
        [("a.jsonl:0", FIRST), ("a.jsonl:1", RejectReason.NOT_JSON)],
    ),
    "too long": (
        b'{"text": "' + b"y" * 10**6 + b'"}\n{"text": "x"}\n',
        [("a.jsonl:0", RejectReason.LINE_TOO_LONG), ("a.jsonl:1", FIRST)],
    ),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(("content", "expected"), LINES.values(), ids=LINES)
def test_lines_are_rows_or_rejects_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, expected: list[Any]
) -> None:
    monkeypatch.setattr("service.plan.sources.files.MAX_LINE_BYTES", 300_000)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    rows = [
        (row.source_id, row.content.reason if isinstance(row.content, RowReject) else row.content)
        for row in rows_of(tmp_path, name)
    ]
    assert rows == [(source_id.replace("a.jsonl", name), kind) for source_id, kind in expected]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet_rows_are_read_without_their_other_columns(tmp_path: Path) -> None:
    rows = [{"id": i, "messages": [ASK, ANSWER | {"name": None}], "embedding": b"\x00"} for i in range(200)]
    read = rows_of(tmp_path, parquet(tmp_path / "a.parquet", rows))
    assert [row.source_id for row in read] == [str(i) for i in range(200)]
    assert all(turns(row.content) == [ASK, ANSWER] for row in read)


def test_a_fault_of_a_part_names_the_part(tmp_path: Path) -> None:
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    parts = [{"source": {"kind": "file", "path": jsonl(tmp_path / "a.jsonl", {"text": "x"}).name}}]
    parts += [{"source": {"kind": "file", "path": "b.parquet"}}]
    with pytest.raises(SourceRefused) as caught:
        list(opened(tmp_path, {"kind": "mix", "sources": parts}).rows())
    assert caught.value.field == "source.sources.1.source.path"


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", *({"text": str(i)} for i in range(9)))
    read = [row.content for row in rows_of(tmp_path, "a.jsonl", limit=2)]
    assert read == [Sample(text="0"), Sample(text="1")]


def test_without_roots_every_file_is_refused_with_the_setting_to_change(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "x"})
    source = SOURCE.validate_python({"kind": "file", "path": str(tmp_path / "a.jsonl")})
    with pytest.raises(SourceRefused, match="not inside") as caught:
        open_source(source, Settings()).listed()
    assert caught.value.cure is not None and "QUARRY_SOURCE_ROOTS" in caught.value.cure


@pytest.mark.parametrize(
    "path", ["link.jsonl", "dir/out.jsonl", "../out.jsonl", "x/../../out.jsonl", "../missing.jsonl", "x"]
)
def test_no_path_leads_out_of_the_roots(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    (root / "x").mkdir(parents=True)
    jsonl(tmp_path / "out.jsonl", {"text": "secret"})
    (root / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    (root / "dir").symlink_to(tmp_path)
    (root / "x" / "a.jsonl").symlink_to(tmp_path / "out.jsonl")
    assert "not inside" in refusal(root, path).detail
    assert "not inside" in refusal(root, root / path).detail


@pytest.mark.parametrize("path", ["data/spool/1", "data/*/*/*.jsonl", "link.jsonl", "linked", "*.jsonl", ""])
def test_a_key_reads_nothing_of_the_data_folder_which_has_everybodys(tmp_path: Path, path: str) -> None:
    """The operator does, as everywhere below the roots; a file is looked at again when it is opened."""
    spool = tmp_path / "data" / "spool" / "1"
    spool.mkdir(parents=True)
    own, others = jsonl(tmp_path / "own.jsonl", {"text": "x"}), jsonl(spool / "a.jsonl", {"text": "y"})
    (tmp_path / "link.jsonl").symlink_to(others)
    (tmp_path / "linked").symlink_to(spool)
    settings = Settings(source_roots=(tmp_path,), data_dir=tmp_path / "data")
    narrowed = settings.narrowed(Grants(scopes=(Scope.JOBS_WRITE,), source_roots=(str(tmp_path),)))
    source = SOURCE.validate_python({"kind": "file", "path": str(tmp_path / path)})
    assert list(open_source(source, settings).listed().rows())
    with pytest.raises(SourceRefused, match="data folder"):
        open_source(source, narrowed).listed()
    source = SOURCE.validate_python({"kind": "file", "path": str(own)})
    read = open_source(source, narrowed).listed()
    assert len(list(read.rows())) == 1
    to_a_link(own, spool)
    others.rename(spool / own.name)
    with pytest.raises(SourceRefused, match="since it was found"):
        list(read.rows())


def test_a_link_inside_the_roots_is_followed(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "x"})
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert [row.content for row in rows_of(tmp_path, "b.jsonl")] == [Sample(text="x")]


def parquet_bytes(columns: dict[str, list[str]]) -> bytes:
    file = BytesIO()
    pq.write_table(pa.table(columns), file, store_schema=False)
    return file.getvalue()


def two_columns(name: str) -> bytes:
    file = BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array([[1]]), pa.array([[2]])], names=[name, name]), file)
    return file.getvalue()


WHOLE = parquet_bytes({"text": [f"row {i} " * 10 for i in range(5000)]})
OTHER_COLUMN = parquet_bytes({"question": ["x"], "qqqq": ["y"]})
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
REFUSED = [
    ("a.json", b'\n[{"text": "x"}]', "'a.json' holds a JSON array"),
    ("bom.json", b'\xef\xbb\xbf[\n{"text": "x"},\n{"text": "y"}\n]', "'bom.json' holds a JSON array"),
    ("spaced.json", b'\xef\xbb\xbf \n[\n{"text": "x"}\n]', "'spaced.json' holds a JSON array"),
    ("wide.jsonl", '{"text": "x"}\r\n{"text": "y"}\r\n'.encode("utf-16"), "'wide.jsonl' is UTF-16"),
    ("lfs.jsonl", POINTER, "'lfs.jsonl' is Git LFS's pointer"),
    ("lfs.parquet", POINTER, "'lfs.parquet' is Git LFS's pointer"),
    ("a.csv", b"text\nx\n", "'a.csv' is not a"),
    ("a.parquet", OTHER_COLUMN, "'a.parquet' has none of the columns"),
    ("a.parquet", two_columns("token_ids"), "'a.parquet' has several columns 'token_ids'"),
    ("a.parquet", OTHER_COLUMN.replace(b"qqqq", b"\xff\xfe\xff\xfe"), "'a.parquet' cannot be read"),
    ("cut.parquet", WHOLE[: len(WHOLE) // 2], "'cut.parquet' cannot be read"),
    ("cut.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9)[:-9], "'cut.jsonl.gz' cannot be read"),
    ("not.parquet", b"text", "'not.parquet' cannot be read"),
    ("not.jsonl.gz", b"text", "'not.jsonl.gz' cannot be read"),
    ("broken.parquet", WHOLE[:4] + b"\xff" * 1996 + WHOLE[2000:], "'broken.parquet' cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "detail"), REFUSED, ids=[detail for *_, detail in REFUSED])
def test_a_file_that_is_no_source_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, detail: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path, name).detail.startswith(detail)


def test_a_path_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "round.jsonl").symlink_to(tmp_path / "round.jsonl")
    assert "no file" in refusal(tmp_path, "missing.jsonl").detail
    assert "holds no .jsonl" in refusal(tmp_path, "d").detail
    for path in ("x" * 300 + ".jsonl", "round.jsonl"):
        assert "cannot be found" in refusal(tmp_path, path).detail


def test_a_file_that_takes_too_much_memory_is_not_taken_for_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's error of memory is one of its errors of a file, too."""

    def exhausted(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("out of memory")

    parquet(tmp_path / "a.parquet", [{"text": "a"}])
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", exhausted)
    with pytest.raises(pa.ArrowMemoryError):
        rows_of(tmp_path, "a.parquet")


def text_of(*values: bytes | None) -> pa.Array:
    """Return a column that says it is text, of any bytes."""
    return pa.array(values, pa.binary()).view(pa.string())


def test_a_row_whose_bytes_are_no_text_is_a_reject_and_its_neighbours_are_read(tmp_path: Path) -> None:
    ids, texts = text_of(b"a", b"b", b"\xff", b"d", None), text_of(b"x", b"\xff", b"y", b"z", b"\xfe\xff")
    pq.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "a.parquet")
    read = rows_of(tmp_path, "a.parquet")
    assert [row.source_id for row in read] == ["a", "a.parquet:1", "a.parquet:2", "d", "a.parquet:4"]
    assert (read[0].content, read[3].content) == (Sample(id="a", text="x"), Sample(id="d", text="z"))
    for at in (1, 2, 4):
        bad = read[at].content
        assert isinstance(bad, RowReject) and bad.reason is RejectReason.INVALID_SAMPLE
        assert "utf-8" in bad.detail


def test_a_date_that_python_has_none_for_costs_its_row_alone(tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("at", pa.timestamp("s"))])
    rows = [[{"role": "user", "content": "x", "at": at}] for at in (0, 10**15, 1)]
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(turn))}), tmp_path / "a.parquet")
    contents = [row.content for row in rows_of(tmp_path, "a.parquet")]
    assert [isinstance(content, Sample) for content in contents] == [True, False, True]
    assert isinstance(contents[1], RowReject) and contents[1].reason is RejectReason.INVALID_SAMPLE


def test_a_label_of_an_unknown_time_zone_costs_its_rows_alone(tmp_path: Path) -> None:
    at = pa.array([0, None], pa.timestamp("s", tz="Mars/Olympus"))
    pq.write_table(pa.table({"text": ["x", "y"], "at": at}), tmp_path / "a.parquet")
    read = opened(tmp_path, {"kind": "file", "path": str(tmp_path)}, labels=("at",))
    bad, good = [row.content for row in read.rows()]
    assert isinstance(bad, RowReject) and "Mars/Olympus" in bad.detail
    assert good == Sample(text="y", labels={"at": None})


def test_a_file_whose_name_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "d" / os.fsdecode(b"b\xff.jsonl")
    path.parent.mkdir()
    jsonl(path, {"text": "y"})
    (tmp_path / "link.jsonl").symlink_to(path)
    for named in ("d", "link.jsonl"):
        error = refusal(tmp_path, named)
        assert "b\\udcff.jsonl" in error.detail and "UTF-8" in error.detail and "rename" in str(error.cure)
        assert error.problem().model_dump_json()


def test_a_file_that_went_away_before_it_was_hashed_is_refused_by_name(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "x"})
    read = of_files(tmp_path, file)
    file.unlink()
    with pytest.raises(SourceRefused, match=r"a\.jsonl"):
        read.fingerprint()


def to_a_link(file: Path, outside: Path) -> None:
    file.unlink()
    file.symlink_to(outside / file.name)


def to_a_link_above(file: Path, outside: Path) -> None:
    file.parent.rename(file.parent.with_name("was"))
    file.parent.symlink_to(outside)


def to_a_fifo(file: Path, outside: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("turns_it", [to_a_link, to_a_link_above, to_a_fifo])
def test_a_file_that_is_another_since_it_was_found_is_not_read(
    tmp_path: Path, turns_it: Callable[[Path, Path], None], name: str
) -> None:
    file, outside = tmp_path / "root" / "in" / name, tmp_path / "outside"
    for path in (file, outside / name):
        path.parent.mkdir(parents=True)
        if name.endswith("parquet"):
            pq.write_table(pa.table({"text": ["a secret"]}), path)
        else:
            pack = gzip.compress if name.endswith("gz") else bytes
            path.write_bytes(pack(b'{"text": "a secret"}\n'))
    found = of_files(tmp_path / "root", file.parent)
    assert len(list(found.rows())) == 1 and found.fingerprint()
    turns_it(file, outside)
    for read in (lambda: list(found.rows()), found.fingerprint):
        with pytest.raises(SourceRefused, match=r"leads out|regular file") as caught:
            read()
        assert "outside" not in str(caught.value) and caught.value.cure


class PlanStopped(Exception):
    """Its job was cancelled."""


def test_the_fingerprint_of_a_file_without_end_heeds_a_cancel(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "x"})
    os.truncate(file, 2**40)
    blocks = iter(range(3))

    def watch() -> None:
        if next(blocks, None) is None:
            raise PlanStopped

    with pytest.raises(PlanStopped):
        of_files(tmp_path, file).fingerprint(watch)


def test_the_fingerprint_of_files_follows_names_contents_and_limit_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    jsonl(folder / "a.jsonl", {"text": "x"})
    first = print_of(tmp_path, "d")
    (folder / "notes.txt").write_text("no source")
    assert print_of(tmp_path, "d") == print_of(tmp_path, folder) == first
    seen = {first, print_of(tmp_path, "d", limit=1)}
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    seen.add(print_of(tmp_path, "d"))
    jsonl(folder / "b.jsonl", {"text": "y"})
    seen.add(print_of(tmp_path, "d"))
    jsonl(folder / "c.jsonl", {"text": "y"})
    seen.add(print_of(tmp_path, "d"))
    assert len(seen) == 5
