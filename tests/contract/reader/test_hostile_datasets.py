"""A stranger's dataset is refused by the name of the file that lies, in little memory, and nothing waits.

`quarry verify` reads what takes more within a bound: `tests/unit/cli/test_verify_process.py`.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset import framing
from schemas.dataset.manifest import body_sha256
from service.errors import SourceRefused
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.run import export
from service.reader import QuarryDataset, QuarryStream, ReaderError
from tests.support.parquet import tell
from tests.support.shards import entry_of

FROZEN = Path(__file__).parents[2] / "frozen" / "datasets"
NORM = "final_norm.safetensors"
Change = Callable[[Path], None]


def sign(folder: Path) -> None:
    """Let the manifest say of every file what it is now."""
    (path,) = folder.glob("manifests/*.json")
    body = json.loads(path.read_text())
    for entry in [*body["shards"], *body["indexes"], *body["extras"]]:
        entry.update(entry_of(folder, entry["path"]).model_dump())
    body["totals"]["bytes"] = sum(entry["bytes"] for entry in body["shards"])
    path.write_text(json.dumps(body | {"sha256": body_sha256(body)}))


def column(name: str, values: Callable[[int], pa.Array]) -> Change:
    """Replace a column of every index, and sign them."""

    def change(folder: Path) -> None:
        for path in folder.glob("index/*/*.parquet"):
            table = pq.read_table(path)
            array = values(len(table))
            place = table.schema.get_field_index(name)
            nullable = table.schema.field(name).nullable
            pq.write_table(table.set_column(place, pa.field(name, array.type, nullable), array), path)
        sign(folder)

    return change


def integers(value: int) -> Callable[[int], pa.Array]:
    return lambda rows: pa.array([value] * rows, pa.int32())


def one_word(rows: int) -> pa.Array:
    """Every row is the same 8 MB of text, once in the file."""
    return pa.DictionaryArray.from_arrays([0] * rows, ["a" * 8_000_000])


def nested(depth: int) -> Callable[[int], pa.Array]:
    kind = pa.int32()
    for _ in range(depth):
        kind = pa.list_(pa.field("element", kind, nullable=False))
    return lambda rows: pa.array([[]] * rows, kind)


def norm(header: object, length: int | None = None) -> Change:
    def change(folder: Path) -> None:
        text = json.dumps(header).encode()
        (folder / NORM).write_bytes(struct.pack("<Q", length or len(text)) + text + bytes(128))
        sign(folder)

    return change


def weight(**lies: object) -> dict[str, object]:
    return {"weight": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]} | lies}


def sparse(pattern: str) -> Change:
    def change(folder: Path) -> None:
        os.truncate(next(folder.glob(pattern)), 2**40)

    return change


def pipe(pattern: str) -> Change:
    """Put a pipe in a file's place: who opens it waits for somebody to write."""

    def change(folder: Path) -> None:
        path = next(folder.glob(pattern))
        path.unlink()
        os.mkfifo(path)

    return change


def without_rows(folder: Path) -> None:
    """Name no file of rows."""
    (path,) = folder.glob("manifests/*.json")
    body = json.loads(path.read_text()) | {"shards": [], "indexes": []}
    path.write_text(json.dumps(body | {"sha256": body_sha256(body)}))


def renamed(folder: Path) -> None:
    """Give the job another id, but not its shards, as if they were another job's of the same model."""
    (path,) = folder.glob("manifests/*.json")
    old, new = path.stem, "j-" + "0" * 16
    for file in (path, folder / "jobs.json"):
        file.write_text(file.read_text().replace(old, new))
    for place in sorted(folder.rglob(f"*{old}*"), key=lambda place: place.is_dir()):
        place.rename(place.with_name(place.name.replace(old, new)))
    for path in folder.glob("index/*/*.parquet"):
        table = pq.read_table(path)
        shards = pa.array([name.replace(old, new) for name in table["shard"].to_pylist()])
        place = table.schema.get_field_index("shard")
        pq.write_table(table.set_column(place, table.schema.field("shard"), shards), path)
    sign(folder)


def with_another_eps(folder: Path) -> None:
    """Let every shard name another final norm than its manifest does."""
    tell(folder, b'"eps":1e-6', b'"eps":1e-2')
    sign(folder)


ATTACKS = {
    "index: dictionary": (column("shard", one_word), r"^index/.*columns are not those of an index"),
    "index: nested lists": (column("input_ids", nested(3)), r"^index/.*columns are not those of an index"),
    "index: deep lists": (column("input_ids", nested(60)), r"^index/.*cannot be read: .*nested"),
    "index: num_tokens too high": (column("num_tokens", integers(2**31 - 1)), r"^index/.*differ in length"),
    "index: num_tokens below zero": (column("num_tokens", integers(-5)), r"^index/.*differ in length"),
    "index: row too high": (column("row", integers(2**31 - 1)), r"^data/.*out of bounds"),
    "index: row below zero": (column("row", integers(-3)), r"^data/.*out of bounds"),
    "norm: header longer than the file": (norm(weight(), 2**24), rf"^{NORM} is not"),
    "norm: header of all memory": (norm(weight(), 2**63), rf"^{NORM} is not"),
    "norm: offsets beyond the file": (norm(weight(data_offsets=[2**40, 2**40 + 128])), rf"^{NORM} is not"),
    "norm: a giant shape": (norm(weight(shape=[2**40])), rf"^{NORM} is not"),
    "norm: a shape that overflows": (norm(weight(shape=[2**32, 2**32])), rf"^{NORM} is not"),
    "norm: a giant shape of nothing": (norm(weight(shape=[2**60, 0])), rf"^{NORM} "),
    "norm: a dtype that torch lacks": (norm(weight(dtype="F8_E8M0", shape=[128])), rf"^{NORM} is not"),
    "norm: sparse": (sparse(NORM), rf"^{NORM} has 1099511627776 bytes"),
    "manifest: sparse": (sparse("manifests/*.json"), r"^manifests/.* has 1099511627776 bytes"),
    "manifest: no row": (without_rows, "shards: Tuple should have at least 1 item"),
    "manifest: pipe": (pipe("manifests/*.json"), r"^manifests/.*a pipe"),
    "index: pipe": (pipe("index/*/*.parquet"), r"^index/.*a pipe"),
    "shard: another job's": (renamed, r"^data/j-0{16}/.* is a shard of job j-"),
    "shard: another final norm": (with_another_eps, r"^data/.* holds other states than its job: .*eps=0.01"),
    "shard: pipe": (pipe("data/*/*.parquet"), r"^data/.*a pipe"),
    "norm: pipe": (pipe(NORM), rf"^{NORM}.*a pipe"),
}


def status_bytes(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) * 1024


def read_all(folder: Path) -> None:
    rows = QuarryDataset(folder)
    for number in range(len(rows)):
        rows[number].auxiliary()
        rows[number].last_normed()


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_lies_is_named_and_takes_little_memory(tmp_path: Path, attack: str) -> None:
    """1. the reader refuses it  2. so does an export, which leaves no file of rows."""
    change, message = ATTACKS[attack]
    folder = tmp_path / "dataset"
    shutil.copytree(FROZEN / "plain", folder)
    change(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    with pytest.raises(ReaderError, match=message):
        read_all(folder)
    with pytest.raises(SourceRefused, match=message):
        export(
            str(folder), tmp_path / "out", ExportOptions(to=FormatName.DEEPSPEC, algorithm=Algorithm.DFLASH)
        )
    assert status_bytes("VmHWM") - before < 2**28
    assert not [path for path in tmp_path.glob("out/**/*") if path.suffix in (".ckpt", ".safetensors", ".pt")]


def page(schema: pa.Schema, name: str, value: object) -> framing.Page:
    """Return what a shard's writer takes; the high plane's page decodes to a gigabyte."""
    if name != "layer_1_hi":
        cell = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        (as_written,) = framing.pages(pa.schema([schema.field(name)]), [cell])
        return as_written
    plain = len(value).to_bytes(4, "little") + value
    payload = memoryview(pa.Codec("zstd").compress(plain + bytes(2**30 - len(plain))))
    head = framing._page_header(len(plain), payload.nbytes, 1)
    return framing.Page(1, len(head) + len(plain), head, payload)


def test_a_page_that_decodes_to_more_than_its_value_is_refused_at_the_values_end(tmp_path: Path) -> None:
    """Footer and header say what is right; only the page's frame is larger."""
    folder = tmp_path / "dataset"
    shutil.copytree(FROZEN / "planes", folder)
    path = folder / QuarryDataset(folder).shard_of(0)
    table = pq.read_table(path)
    file = framing.ShardFile(path, table.schema)
    for row in table.to_pylist():
        file.write_row(page(table.schema, name, value) for name, value in row.items())
    file.end()
    sign(folder)
    assert path.stat().st_size < 2**22
    rows = QuarryDataset(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    with pytest.raises(ReaderError, match=rf"{path.name}: row 0: layer 1 cannot be read"):
        rows[0].layer(1)
    assert status_bytes("VmHWM") - before < 2**28


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda body: body["indexes"].pop(0), "its list of indexes lacks 'index/.*/train-00000.parquet'"),
        (lambda body: body["indexes"][0].update(path="x" * 10_000), "its list of indexes lacks 'index/"),
        (lambda body: body.update(identity_sha256="0" * 10_000), "its identity_sha256 is '000"),
        (lambda body: body["shards"][0].update(unit=7), "its list of indexes lacks .*train-00007"),
        (
            lambda body: body["shards"][0].update(path="data/train.parquet"),
            "is not the path of a shard of unit 0",
        ),
        (lambda body: body["shards"].append(body["shards"][0]), "samples_written is 7, expected 11"),
        (lambda body: body["shards"][0].update(rows=0), "shards.0.rows: Input should be greater than 0"),
        (lambda body: body["shards"][0].update(rows=3), "samples_written is 7, expected 6"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_neither_read_nor_followed(
    tmp_path: Path, change: Callable[[dict], object], told: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(FROZEN / "plain", folder)
    (path,) = folder.glob("manifests/*.json")
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body | {"sha256": body_sha256(body)}))
    with pytest.raises(ReaderError, match=told) as caught:
        QuarryDataset(folder)
    assert len(str(caught.value)) < 1000
    followed = QuarryStream.follow(folder, path.stem, rank=0, world_size=1, patience_s=0)
    with pytest.raises(ReaderError, match=told):
        list(followed)


def test_a_follower_does_not_lose_the_rows_that_an_index_leaves_out(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(FROZEN / "plain", folder)
    path = min(folder.glob("index/*/*.parquet"))
    pq.write_table(pq.read_table(path)[:-1], path)
    sign(folder)
    job = next(folder.glob("manifests/*.json")).stem
    told = "holds 3 rows, the entries of its shards 4"
    followed = QuarryStream.follow(folder, job, rank=0, world_size=1, patience_s=0)
    with pytest.raises(ReaderError, match=told):
        list(followed)
