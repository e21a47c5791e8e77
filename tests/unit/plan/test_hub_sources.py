"""Datasets on the Hub: what is read, what is refused, and that each names its own files alone.

A dataset repository must not name anything else that this node can reach.
"""

import gzip
import json
import pickle
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import hf_hub_url
from pydantic import SecretStr

from schemas.source import HubSource, MixSource, Sample
from service.errors import HubUnavailable, SourceRefused
from service.plan.sources import RowReject, RowSource, SourceRow, open_source, without_token
from service.plan.sources.conversations import read_row
from service.settings import Settings
from tests.support.fake_hub import FakeHub, Fault, Token

ASK = [{"role": "user", "content": "q"}]
SECRET, OWN = {"text": "of the node"}, {"text": "of the repository"}


@pytest.fixture
def hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Return the Hub, where `datasets` looks for a standalone YAML at the endpoint of its environment."""
    url = partial(hf_hub_url, repo_type="dataset", endpoint=hub.url)
    monkeypatch.setattr("datasets.load.hf_dataset_url", url)
    return hub


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def card(*configs: dict[str, Any], **more: Any) -> bytes:
    named = [{"config_name": "default"} | config for config in configs]
    return f"---\n{json.dumps({'configs': named} | more)}\n---\n".encode()


FIVE = {"train.jsonl": jsonl(*({"id": f"r{i}", "text": "x"} for i in range(5)))}


def source(hub: FakeHub, files: dict[str, bytes], **options: Any) -> RowSource:
    """Return the source that reads `org/set`, where these files are."""
    hub.add_repo("org/set", files)
    asked = HubSource.model_validate({"kind": "hub", "repo_id": "org/set"} | options)
    return open_source(asked, Settings(hub_endpoint=hub.url))


def rows(hub: FakeHub, files: dict[str, bytes], **options: Any) -> list[SourceRow]:
    return list(source(hub, files, **options).rows())


def refusal(hub: FakeHub, files: dict[str, bytes], **options: Any) -> SourceRefused:
    with pytest.raises(SourceRefused) as caught:
        rows(hub, files, **options)
    assert caught.value.field == "source.repo_id" and caught.value.cure
    assert "of the node" not in str(caught.value)
    return caught.value


def columns(**values: Any) -> bytes:
    pq.write_table(pa.table(values), written := BytesIO())
    return written.getvalue()


TABLE = columns(text=["of the repository"], extra=[1])


def test_a_dataset_is_streamed_up_to_its_limit(hub: FakeHub) -> None:
    assert [row.source_id for row in rows(hub, FIVE)] == ["r0", "r1", "r2", "r3", "r4"]
    assert [row.source_id for row in rows(hub, FIVE, limit=2)] == ["r0", "r1"]


def test_another_configuration_split_and_format_is_read(hub: FakeHub) -> None:
    config = {"config_name": "columns", "data_files": [{"split": "test", "path": "t.parquet"}]}
    files = {"README.md": card(config), "t.parquet": TABLE}
    assert [row.content for row in rows(hub, files, config="columns", split="test")] == [Sample(**OWN)]


ODD: list[dict[str, Any]] = [
    {"id": "a", "text": '"quoted"', "on": "2024-01-01"},
    {"id": "b", "text": "[1, 2]", "on": "2024-01-02"},
    {"id": 3, "text": [{"type": "text", "text": "a part"}]},
    {"id": "4", "text": "null", "on": None},
    {"messages": ASK, "tools": [{"name": "f", "default": None, "least": 0.123456789012345}]},
]
"""Texts that are JSON, types that change, nulls and long numbers."""


@pytest.mark.parametrize("files", ["lines", "array", "field", "packed"])
def test_json_is_read_as_it_is_written(hub: FakeHub, files: str) -> None:
    """`datasets` alone would fix the types by the first chunk, and make other text of later rows."""
    expected = [read_row(row, ["on"])[1] for row in ODD]
    named = {
        "lines": ("a.jsonl", b"\xef\xbb\xbf" + jsonl(*ODD).replace(b"\n", b"\r\n\n")),
        "array": ("a.json", b"\xef\xbb\xbf" + json.dumps(ODD, indent=1).encode()),
        "field": ("a.json", json.dumps({"version": 1, "data": ODD}).encode()),
        "packed": ("a.jsonl.gz", gzip.compress(jsonl(*ODD))),
    }
    name, content = named[files]
    more = {"field": "data"} if files == "field" else {"chunksize": 100}
    held = {"README.md": card({"data_files": name} | more), name: content}
    hub.add_repo("org/set", held)
    asked = HubSource(kind="hub", repo_id="org/set")
    opened = open_source(asked, Settings(hub_endpoint=hub.url), labels=("on",))
    assert [row.content for row in opened.rows()] == expected


def test_each_json_file_has_a_form_of_its_own(hub: FakeHub) -> None:
    texts = [{"text": name} for name in "abcdefg"]
    parts = [
        *(b"", jsonl(*texts[:2]).rstrip(), b'[{"text": "c"}, {"text": "d"}]'),
        *(b"\xef\xbb\xbf\n" + jsonl(texts[4]), json.dumps([texts[5], "g"], indent=1).encode(), b"\n"),
    ]
    read = rows(hub, {f"data/train-{place}.json": part for place, part in enumerate(parts)})
    assert [row.content for row in read] == [Sample(**text) for text in texts]
    assert [row.source_id for row in read] == list("0123456")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_json_is_read_in_the_encoding_that_the_card_says(hub: FakeHub, encoding: str) -> None:
    named = card({"data_files": "a.jsonl", "encoding": encoding})
    files = {"README.md": named, "a.jsonl": '{"text": "\u00e9"}\n'.encode(encoding)}
    assert [row.content for row in rows(hub, files)] == [Sample(text="\u00e9")]


def test_utf_16_that_the_card_does_not_name_is_refused(hub: FakeHub) -> None:
    """Its first line would be a row, and the others rejects."""
    lines = '{"text": "a"}\n{"text": "b"}\n'
    with pytest.raises(SourceRefused, match="in UTF-16"):
        rows(hub, {"train.jsonl": lines.encode("utf-16")})


def test_a_line_that_is_no_json_is_a_reject(hub: FakeHub) -> None:
    read = rows(hub, {"train.jsonl": b'{"text": "a", "text": "b"}\n' + jsonl(OWN) + b"{\n" + jsonl(OWN)})
    assert [isinstance(row.content, Sample) for row in read] == [False, True, False, True]


@pytest.mark.parametrize("field", [None, "data"])
def test_a_row_of_a_document_that_has_a_key_twice_is_a_reject(hub: FakeHub, field: str | None) -> None:
    turn = json.dumps(ASK[0])[:-1] + ', "content": "other"}'
    text = f'[{{"text": "a", "text": "b"}}, {json.dumps(OWN)}, {{"messages": [{turn}]}}]'
    files = {"a.json": (text if field is None else f'{{"data": {text}}}').encode()}
    read = rows(hub, files | {"README.md": card({"data_files": "a.json", "field": field})})
    details = [row.content.detail if isinstance(row.content, RowReject) else "" for row in read]
    assert details == ["an object has several 'text'", "", "an object has several 'content'"]


def test_a_row_of_a_document_that_is_nested_deep_does_not_refuse_the_others(hub: FakeHub) -> None:
    deep = "[" * 480 + "]" * 480  # a stack of two frames for each would not do
    read = rows(hub, {"a.json": f'[\n{{"messages": {deep}}},\n{json.dumps(OWN)}]'.encode()})
    assert [isinstance(row.content, RowReject) for row in read] == [True, False]


def turns_with_two_contents() -> pa.Table:
    values = [pa.array([text]) for text in ("user", "first", "second")]
    turn = pa.StructArray.from_arrays(values, names=["role", "content", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 1]), turn)})


def as_arrow(table: pa.Table) -> bytes:
    with pa.ipc.new_stream(written := BytesIO(), table.schema) as stream:
        stream.write_table(table)
    return written.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "twice"),
    [
        ("a.csv", b"text,on,text\na,b,c\n", "text"),
        ("a.parquet", columns(messages=turns_with_two_contents()["messages"]), "content"),
        ("a.arrow", as_arrow(turns_with_two_contents()), "content"),
    ],
)
def test_a_name_that_a_file_has_twice_is_refused_since_either_may_be_meant(
    hub: FakeHub, name: str, content: bytes, twice: str
) -> None:
    assert f"has several columns or members {twice!r}" in refusal(hub, {name: content}).detail


def test_a_document_that_has_the_key_of_its_rows_twice_is_refused(hub: FakeHub) -> None:
    files = {"a.json": b'{"data": [], "data": [{"text": "a"}]}'}
    named = files | {"README.md": card({"data_files": "a.json", "field": "data"})}
    assert "several 'data'" in refusal(hub, named).detail


def test_a_zip_archive_is_refused_by_name(hub: FakeHub) -> None:
    with ZipFile(packed := BytesIO(), "w") as zipped:
        zipped.writestr("a.jsonl", jsonl({"text": "packed"}))
    assert (
        "'train.zip' of the dataset is a Zip archive" in refusal(hub, {"train.zip": packed.getvalue()}).detail
    )


def test_a_source_for_a_child_that_checks_holds_no_token(hub: FakeHub) -> None:
    hub.add_repo("org/set", FIVE)
    hub.add_token("hf_secret", Token(user="me", role="read", orgs={"org": "read"}))
    part = {"kind": "hub", "repo_id": "org/set"}
    asked = MixSource.model_validate({"kind": "mix", "sources": [{"source": part}, {"source": part}]})
    settings = Settings(hub_endpoint=hub.url, hub_token=SecretStr("hf_secret"))
    opened = open_source(asked, settings)
    assert "hf_secret" not in f"{pickle.dumps(without_token(opened))!r}"
    assert "hf_secret" in f"{pickle.dumps(opened)!r}"


def test_the_fingerprint_is_the_commit_configuration_split_and_limit(hub: FakeHub) -> None:
    every: Sequence[dict[str, Any]] = ({}, {"split": "test"}, {"limit": 3}, {"config": "other"})
    prints = {source(hub, FIVE, **options).fingerprint() for options in every}
    assert len(prints) == 4 and all(hub.repo("org/set").head.oid in one for one in prints)


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        ({"repo_id": "org/none"}, "org/none"),
        ({"revision": "no-such"}, "org/set"),
        ({"split": "none"}, "Available splits: ['train']"),
        ({"config": "none"}, "org/set"),
    ],
)
def test_what_a_dataset_does_not_have_is_refused(hub: FakeHub, options: dict[str, str], detail: str) -> None:
    assert detail in refusal(hub, FIVE, **options).detail


def test_a_private_dataset_needs_a_token_that_may_read_it(hub: FakeHub) -> None:
    hub.add_repo("org/private", {"train.jsonl": jsonl(OWN)}, private=True)
    hub.add_token("hf_reader", Token(user="me", role="read", orgs={"org": "read"}))
    refusal(hub, {}, repo_id="org/private")
    asked = HubSource(kind="hub", repo_id="org/private")
    allowed = Settings(hub_endpoint=hub.url, hub_token=SecretStr("hf_reader"))
    assert [row.content for row in open_source(asked, allowed).rows()] == [Sample(**OWN)]


@pytest.mark.parametrize(
    ("files", "detail"),
    [
        ({"README.md": b"nothing"}, "cannot be read"),
        ({"README.md": b"---\ndataset_info:\n  splits: 5\n---\n"}, "cannot be read: TypeError"),
        ({"README.md": b"---\nconfigs: [\n---\n"}, "cannot be read"),
        ({"README.md": b"---\nconfigs: 5\n---\n"}, "cannot be read"),
        ({"README.md": b"---\n- 1\n---\n"}, "cannot be read"),
        ({"README.md": card({"data_files": "train.jsonl", "name": "x"})} | FIVE, "cannot be read"),
        ({".huggingface.yaml": b"configs: ["} | FIVE, "cannot be read"),
        ({"train.jsonl.gz": b"no gzip"}, "cannot be read"),
        ({"train.jsonl.gz": gzip.compress(jsonl(OWN) * 9)[:-9]}, "cannot be read: EOFError"),
        ({"train.jsonl.gz": gzip.compress(b"")[:10] + b"\xff" * 9}, "cannot be read: error"),
        ({"train.jsonl.xz": b"\xfd7zXZ\0 and no more"}, "cannot be read: LZMAError"),
        ({"train.jsonl.bz2": b"BZh9 and no more"}, "cannot be read: a file is broken"),
        ({"train.parquet": TABLE[:4] + b"\xff" * 9 + TABLE[13:]}, "cannot be read: a file is broken"),
        ({"README.md": card({"data_files": "b.jsonl"})} | FIVE, "cannot be read: Unable to find 'hf://"),
        ({"a.tar": b"content"}, "of the form 'webdataset'"),
        ({"train.parquet": b"PAR1" * 9}, "cannot be read"),
        ({"a.h5": b"content"}, "of the form 'hdf5'"),
        ({"a.lance": b"content"}, "of the form 'lance'"),
        ({"a.vortex": b"content"}, "of the form 'vortex'"),
    ],
)
def test_a_dataset_that_is_empty_broken_or_of_another_form_is_refused(
    hub: FakeHub, files: dict[str, bytes], detail: str
) -> None:
    assert detail in refusal(hub, files).detail


@pytest.mark.parametrize(("endpoint", "nth"), [("info", 1), *(("resolve", nth) for nth in range(1, 6))])
def test_a_hub_that_fails_is_not_a_refused_source_and_not_one_without_metadata(
    hub: FakeHub, endpoint: str, nth: int
) -> None:
    hub.fail(endpoint, Fault(status=520, nth=nth))
    metadata = json.dumps({"configs": [{"config_name": "default", "data_files": "own.jsonl"}]}).encode()
    with pytest.raises(HubUnavailable, match="answered 520"):
        rows(hub, FIVE | {".huggingface.yaml": metadata, "own.jsonl": jsonl(OWN)})


def test_a_folder_of_the_same_name_is_not_taken_for_a_dataset(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "set").mkdir(parents=True)
    (tmp_path / "org" / "set" / "train.jsonl").write_bytes(jsonl(SECRET))
    monkeypatch.chdir(tmp_path)
    assert rows(hub, FIVE, limit=1)[0].source_id == "r0"


def outside(tmp_path: Path) -> Path:
    path = tmp_path / "node" / "train.jsonl"
    path.parent.mkdir()
    path.write_bytes(jsonl(SECRET))
    return path


PATTERNS = [
    "{path}",
    "{folder}/*.jsonl",
    "file://{path}",
    "file:{path}",
    "local://{path}",
    "{url}/secret.jsonl",
    "hf://datasets/org/other/train.jsonl",
    "hf://datasets/org/set@main/train.jsonl",
    "../other@main/train.jsonl",
    "a/../../../train.jsonl",
    "train_1.jsonl::{path}",
    "zip://train.jsonl::{path}",
    "memory://train.jsonl",
    "x:train.jsonl",
]


FORMS = ["list", "split", "splits", "yaml", "second"]


@pytest.mark.parametrize(
    ("form", "pattern"), [*(("text", name) for name in PATTERNS), *((form, "{path}") for form in FORMS)]
)
def test_a_repository_may_not_name_files_outside_itself(
    hub: FakeHub, tmp_path: Path, pattern: str, form: str
) -> None:
    path = outside(tmp_path)
    named = pattern.format(path=path, folder=path.parent, url=hub.url)
    hub.add_repo("org/other", {"train.jsonl": jsonl(SECRET)})
    data_files: Any = {
        "list": ["train.jsonl", named],
        "split": [{"split": "train", "path": named}],
        "splits": [{"split": "train", "path": ["train.jsonl"]}, {"split": "test", "path": [named]}],
    }.get(form, named)
    config = {"data_files": data_files}
    if form == "yaml":
        files = {".huggingface.yaml": json.dumps({"configs": [{"config_name": "default"} | config]}).encode()}
    elif form == "second":
        files = {"README.md": card({"config_name": "first", "data_files": "train.jsonl"}, config)}
    else:
        files = {"README.md": card(config)}
    error = refusal(hub, {"train.jsonl": jsonl(OWN)} | files)
    assert named in error.detail and "outside" in error.detail


@pytest.mark.parametrize(
    "folder", ["{folder}", "..", "a/../../other@main", "file:{folder}", "hf://datasets/org/other"]
)
def test_a_repository_may_not_name_a_folder_outside_itself(hub: FakeHub, tmp_path: Path, folder: str) -> None:
    named = folder.format(folder=outside(tmp_path).parent)
    files = {"README.md": card({"data_dir": named}), "train.jsonl": jsonl(OWN)}
    assert named in refusal(hub, files).detail


def test_nothing_is_asked_of_a_host_that_a_repository_names(hub: FakeHub) -> None:
    with FakeHub() as other:
        for pattern in ("{}/org/set/resolve/main/a.jsonl", "zip://a.jsonl::{}/org/set/resolve/main/a.zip"):
            refusal(hub, {"README.md": card({"data_files": pattern.format(other.url)})})
        assert not other.calls


def test_a_file_of_a_row_is_not_opened(hub: FakeHub, tmp_path: Path) -> None:
    """A column that the card declares to be an image names a URL and a path: the row is a reject."""
    with FakeHub() as other:
        named = [
            {"bytes": None, "path": f"{other.url}/org/set/resolve/main/a.png"},
            {"bytes": None, "path": "/etc/passwd"},
        ]
        data = jsonl(*({"text": one} for one in named))
        info = {"features": [{"name": "text", "dtype": "image"}]}
        read = rows(hub, {"README.md": card({"data_files": "a.jsonl"}, dataset_info=info), "a.jsonl": data})
        assert not other.calls
    assert len(read) == 2 and not any(isinstance(row.content, Sample) for row in read)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"data_files": "*.jsonl"},
        {"data_files": ["train.jsonl"]},
        {"data_files": [{"split": "train", "path": "**/train.jsonl"}]},
        {"data_files": [{"split": "train", "path": ["train.jsonl"]}, {"split": "test", "path": "b..c/*"}]},
        {"data_dir": "b..c"},
    ],
)
def test_a_repository_may_name_its_own_files(hub: FakeHub, config: dict[str, Any]) -> None:
    files = {"README.md": card(config), "train.jsonl": jsonl(OWN), "b..c/test.jsonl": jsonl(OWN)}
    split = "test" if "data_dir" in config else "train"
    assert [row.content for row in rows(hub, files, split=split)] == [Sample(text="of the repository")]


def test_a_standalone_yaml_may_name_files_of_the_repository(hub: FakeHub) -> None:
    yaml = b"configs:\n- config_name: mine\n  data_files: mine.jsonl\n"
    files = {".huggingface.yaml": yaml, "mine.jsonl": jsonl(OWN), "train.jsonl": jsonl(SECRET)}
    assert [row.content for row in rows(hub, files, config="mine")] == [Sample(text="of the repository")]
