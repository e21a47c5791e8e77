"""Sources: what is read, what is a reject, and what is refused."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr, TypeAdapter

from schemas.request import Sample, Source
from service.errors import HubUnavailable, SourceRefused
from service.plan.sources import RejectReason, RowReject, SourceRow, fingerprint, open_source
from service.settings import Settings
from tests.support.fake_hub import FakeHub, Fault, Token

SOURCE: TypeAdapter[Any] = TypeAdapter(Source)


def rows_of(root: Path, path: str | Path, **options: Any) -> list[SourceRow]:
    source = SOURCE.validate_python({"kind": "file", "path": str(path)} | options)
    return list(open_source(source, Settings(source_roots=(root,))).rows())


def refusal(root: Path, path: str | Path, **options: Any) -> SourceRefused:
    with pytest.raises(SourceRefused) as caught:
        rows_of(root, path, **options)
    assert caught.value.field == "source.path" and caught.value.cure
    return caught.value


def print_of(root: Path, path: str | Path, **options: Any) -> str:
    source = SOURCE.validate_python({"kind": "file", "path": str(path)} | options)
    return fingerprint(source, Settings(source_roots=(root,)))


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(sample: Sample | RowReject) -> list[dict[str, Any]]:
    assert isinstance(sample, Sample), sample
    return [message.for_template() for message in sample.messages or ()]


ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_inline_samples_are_numbered_and_keep_their_ids(tmp_path: Path) -> None:
    source = SOURCE.validate_python({"kind": "inline", "samples": [{"id": "a", "text": "x"}, {"text": "y"}]})
    found = list(open_source(source, Settings()).rows())
    assert [row.source_id for row in found] == ["a", "1"]
    assert fingerprint(source, Settings()).startswith("inline:")


def test_jsonl_rows_are_numbered_over_blank_and_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n\n{"text": \n[1]\n{"id": "mine", "text": "y"}\n\xff\n{"text": "end"}')
    found = rows_of(tmp_path, path)
    ids = [f"a.jsonl:{i}" for i in range(6)]
    assert [row.source_id for row in found] == [*ids[:3], "mine", *ids[4:]]
    reasons = [row.content.reason if isinstance(row.content, RowReject) else None for row in found]
    assert reasons == [None, "not-json", "not-an-object", None, "not-json", None]


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


def test_a_line_nested_without_end_is_a_reject(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + "[" * 200_000 + "\n")
    found = rows_of(tmp_path, "a.jsonl")[1].content
    assert isinstance(found, RowReject) and found.reason is RejectReason.NOT_JSON


def test_a_line_that_is_too_long_is_a_reject_and_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.plan.sources.files.MAX_LINE_BYTES", 64)
    jsonl(tmp_path / "a.jsonl", {"text": "x"}, {"text": "y" * 1000}, {"text": "z"})
    contents = [row.content for row in rows_of(tmp_path, "a.jsonl")]
    assert contents[0] == Sample(text="x") and contents[2] == Sample(text="z")
    assert isinstance(contents[1], RowReject) and contents[1].reason is RejectReason.LINE_TOO_LONG


def test_compressed_jsonl_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n{"text": "y"}\n'))
    assert [row.content for row in rows_of(tmp_path, "a.jsonl.gz")] == [Sample(text="x"), Sample(text="y")]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet_rows_are_read_without_their_other_columns(tmp_path: Path) -> None:
    rows = [{"id": i, "messages": [ASK, ANSWER | {"name": None}], "image": b"\x00" * 10} for i in range(200)]
    found = rows_of(tmp_path, parquet(tmp_path / "a.parquet", rows))
    assert [row.source_id for row in found] == [str(i) for i in range(200)]
    assert all(turns(row.content) == [ASK, ANSWER] for row in found)


def test_a_folder_is_read_in_name_order_and_other_files_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    jsonl(folder / "b.jsonl", {"text": "2"})
    parquet(folder / "a.parquet", [{"text": "1"}])
    jsonl(folder / "sub" / "c.jsonl", {"text": "3"})
    jsonl(folder / ".hidden" / "x.jsonl", {"text": "no"})
    (folder / "README.md").write_text("no")
    found = rows_of(tmp_path, "d")
    assert [row.source_id for row in found] == ["a.parquet:0", "b.jsonl:0", "sub/c.jsonl:0"]


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", *({"text": str(i)} for i in range(9)))
    found = [row.content for row in rows_of(tmp_path, "a.jsonl", limit=2)]
    assert found == [Sample(text="0"), Sample(text="1")]


def test_without_roots_every_file_is_refused_with_the_setting_to_change(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "x"})
    source = SOURCE.validate_python({"kind": "file", "path": str(tmp_path / "a.jsonl")})
    with pytest.raises(SourceRefused, match="not inside") as caught:
        open_source(source, Settings())
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


def test_a_link_inside_the_roots_is_followed(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "x"})
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert [row.content for row in rows_of(tmp_path, "b.jsonl")] == [Sample(text="x")]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert "no row" in refusal(tmp_path, "a.jsonl").detail


def test_a_json_array_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\n[{"text": "x"}]')
    error = refusal(tmp_path, "a.json")
    assert "array" in error.detail and "jq" in str(error.cure)


def test_what_is_not_there_or_has_no_known_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "d").mkdir()
    parquet(tmp_path / "a.parquet", [{"question": "x"}])
    assert "no file" in refusal(tmp_path, "missing.jsonl").detail
    assert "a.csv" in refusal(tmp_path, "a.csv").detail
    assert "holds no .jsonl" in refusal(tmp_path, "d").detail
    assert "columns" in refusal(tmp_path, "a.parquet").detail


@pytest.mark.parametrize("name", ["cut.parquet", "cut.jsonl.gz", "not.parquet", "not.jsonl.gz"])
def test_a_file_that_is_not_whole_is_refused_by_name(tmp_path: Path, name: str) -> None:
    whole = parquet(tmp_path / "w.parquet", [{"text": str(i)} for i in range(5000)]).read_bytes()
    contents = {
        "cut.parquet": whole[: len(whole) // 2],
        "cut.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 100_000)[:-40],
        "not.parquet": b"text",
        "not.jsonl.gz": b"text",
    }
    (tmp_path / name).write_bytes(contents[name])
    assert repr(name) in refusal(tmp_path, name).detail


def test_a_parquet_file_with_broken_pages_is_refused_and_no_crash(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"text": f"row {i} " * 10} for i in range(5000)])
    content = bytearray(path.read_bytes())
    content[4:2000] = b"\xff" * 1996
    path.write_bytes(content)
    assert "cannot be read" in refusal(tmp_path, "a.parquet").detail


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
    found = rows_of(tmp_path, "a.parquet")
    assert [row.source_id for row in found] == ["a", "a.parquet:1", "a.parquet:2", "d", "a.parquet:4"]
    assert (found[0].content, found[3].content) == (Sample(id="a", text="x"), Sample(id="d", text="z"))
    for at in (1, 2, 4):
        bad = found[at].content
        assert isinstance(bad, RowReject) and bad.reason is RejectReason.INVALID_SAMPLE
        assert "utf-8" in bad.detail


def test_a_date_that_python_has_none_for_costs_its_row_alone(tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("at", pa.timestamp("s"))])
    rows = [[{"role": "user", "content": "x", "at": at}] for at in (0, 10**15, 1)]
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(turn))}), tmp_path / "a.parquet")
    contents = [row.content for row in rows_of(tmp_path, "a.parquet")]
    assert [isinstance(content, Sample) for content in contents] == [True, False, True]
    assert isinstance(contents[1], RowReject) and contents[1].reason is RejectReason.INVALID_SAMPLE


def test_a_column_whose_name_is_no_text_is_refused_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"], "qqqq": ["y"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"qqqq", b"\xff\xfe\xff\xfe"))
    assert "'a.parquet' cannot be read" in refusal(tmp_path, "a.parquet").detail


def test_a_file_whose_name_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "d" / os.fsdecode(b"b\xff.jsonl")
    path.parent.mkdir()
    jsonl(path, {"text": "y"})
    (tmp_path / "link.jsonl").symlink_to(path)
    for named in ("d", "link.jsonl"):
        error = refusal(tmp_path, named)
        assert "b\\udcff.jsonl" in error.detail and "UTF-8" in error.detail and "rename" in str(error.cure)
        assert error.problem().model_dump_json()


def test_a_path_that_cannot_be_looked_up_is_refused(tmp_path: Path) -> None:
    (tmp_path / "round.jsonl").symlink_to(tmp_path / "round.jsonl")
    for path in ("x" * 300 + ".jsonl", "round.jsonl"):
        assert "cannot be found" in refusal(tmp_path, path).detail


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
    assert "Permission denied" in refusal(tmp_path, tmp_path).detail


def test_a_file_that_went_away_before_it_was_hashed_is_refused_by_name(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "x"})
    source = SOURCE.validate_python({"kind": "file", "path": str(file)})
    found = open_source(source, Settings(source_roots=(tmp_path,)))
    file.unlink()
    with pytest.raises(SourceRefused, match=r"a\.jsonl"):
        found.fingerprint()


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


@pytest.fixture
def hub(hub: FakeHub, tmp_path: Path) -> FakeHub:
    rows = "".join(json.dumps({"id": f"r{i}", "messages": [ASK, ANSWER]}) + "\n" for i in range(5))
    hub.add_repo("org/set", {"train.jsonl": rows.encode()})
    table = parquet(tmp_path / "t.parquet", [{"text": "test", "extra": 1}]).read_bytes()
    card = b"---\nconfigs:\n- config_name: columns\n  data_files:\n  - {split: test, path: t.parquet}\n---\n"
    hub.add_repo("org/columns", {"README.md": card, "t.parquet": table})
    return hub


def hub_rows(hub: FakeHub, **options: Any) -> list[SourceRow]:
    source = SOURCE.validate_python({"kind": "hub", "repo_id": "org/set"} | options)
    return list(open_source(source, Settings(hub_endpoint=hub.url)).rows())


def test_a_hub_dataset_is_streamed(hub: FakeHub) -> None:
    found = hub_rows(hub)
    assert [row.source_id for row in found] == ["r0", "r1", "r2", "r3", "r4"]
    assert all(turns(row.content) == [ASK, ANSWER] for row in found)
    assert [row.source_id for row in hub_rows(hub, limit=2)] == ["r0", "r1"]


def test_another_configuration_split_and_format_of_a_hub_dataset_is_read(hub: FakeHub) -> None:
    (row,) = hub_rows(hub, repo_id="org/columns", config="columns", split="test")
    assert row.content == Sample(text="test")


def test_the_fingerprint_of_a_hub_dataset_is_its_commit_configuration_split_and_limit(hub: FakeHub) -> None:
    def of(**options: Any) -> str:
        source = SOURCE.validate_python({"kind": "hub", "repo_id": "org/set"} | options)
        return fingerprint(source, Settings(hub_endpoint=hub.url))

    assert hub.repo("org/set").head.oid in of()
    assert len({of(), of(split="test"), of(limit=3), of(config="other")}) == 4


@pytest.mark.parametrize(
    "options", [{"repo_id": "org/none"}, {"revision": "no-such"}, {"split": "none"}, {"config": "none"}]
)
def test_what_a_hub_dataset_does_not_have_is_refused(hub: FakeHub, options: dict[str, str]) -> None:
    with pytest.raises(SourceRefused) as caught:
        hub_rows(hub, **options)
    assert caught.value.field == "source.repo_id" and caught.value.cure
    assert options.get("repo_id", "org/set") in caught.value.detail


def test_a_private_hub_dataset_needs_a_token_that_may_read_it(hub: FakeHub) -> None:
    hub.add_repo("org/private", {"train.jsonl": b'{"text": "x"}\n'}, private=True)
    hub.add_token("hf_reader", Token(user="me", role="read", orgs={"org": "read"}))
    source = SOURCE.validate_python({"kind": "hub", "repo_id": "org/private"})
    with pytest.raises(SourceRefused) as caught:
        open_source(source, Settings(hub_endpoint=hub.url))
    assert caught.value.field == "source.repo_id"
    allowed = Settings(hub_endpoint=hub.url, hub_token=SecretStr("hf_reader"))
    assert [row.content for row in open_source(source, allowed).rows()] == [Sample(text="x")]


@pytest.mark.parametrize(
    ("files", "detail"),
    [
        ({"README.md": b"nothing"}, "cannot be read"),
        ({"train.csv": b"text\n"}, "holds no row"),
        ({"README.md": b"---\ndataset_info:\n  splits: 5\n---\n"}, "cannot be read: TypeError"),
        ({"train.jsonl.gz": b"no gzip"}, "cannot be read: "),
        ({"train.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 9)[:-9]}, "cannot be read: EOFError"),
        ({"train.jsonl.gz": gzip.compress(b"")[:10] + b"\xff" * 9}, "cannot be read: error"),
        ({"train.parquet": b"PAR1" * 9}, "cannot be read: "),
    ],
)
def test_an_empty_hub_dataset_or_a_broken_card_is_refused(
    hub: FakeHub, files: dict[str, bytes], detail: str
) -> None:
    hub.add_repo("org/empty", files)
    with pytest.raises(SourceRefused, match=detail):
        hub_rows(hub, repo_id="org/empty")


def test_a_hub_that_fails_is_not_a_refused_source(hub: FakeHub) -> None:
    hub.fail("info", Fault(status=503, times=100))
    with pytest.raises(HubUnavailable):
        hub_rows(hub)


def test_a_folder_of_the_same_name_is_not_taken_for_a_hub_dataset(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "set").mkdir(parents=True)
    jsonl(tmp_path / "org" / "set" / "train.jsonl", {"text": "local"})
    monkeypatch.chdir(tmp_path)
    assert hub_rows(hub, limit=1)[0].source_id == "r0"
