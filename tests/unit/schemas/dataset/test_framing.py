import io
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace

import datasets
import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
import xxhash

from schemas.dataset import framing
from schemas.dataset.columns import METADATA_KEY, layer_columns, shard_schema
from schemas.dataset.direct import BLOCK_BYTES
from schemas.dataset.framing import MAGIC, ShardFile, pages
from schemas.dataset.shard import open_shard
from schemas.dataset.states import read_states
from schemas.identity import DTYPE_BYTES
from tests.support.parquet import footer_xxh3, writer_options, xxh3_of
from tests.support.plans import identity, provenance

LAYERS = (1, 5, 8)
HIDDEN_SIZE = 16
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 33, 1, 3, 5, 64, 65, 100, 1000)
"""More rows than a short list of Thrift's holds."""

KINDS = [(dtype, form) for dtype in DTYPE_BYTES for form in ("none", "planes", "fp8")]
ALIGNED_BYTES = 256
"""Of a shorter layer than the format aligns, so that small files have both kinds."""


def schema_of(dtype="bfloat16", form="none"):
    about = identity(layer_ids=LAYERS, hidden_size=HIDDEN_SIZE, dtype=dtype, compression=form)
    return shard_schema(LAYERS, HIDDEN_SIZE, dtype, form).with_metadata(
        {METADATA_KEY: provenance(about).model_dump_json().encode(), b"another": "\u00fc".encode()}
    )


def random_row(number, length, dtype="bfloat16", form="none"):
    """Any bit patterns, as a row and as its layers' raw bytes."""
    draw = np.random.default_rng([number, length])
    width, codes = DTYPE_BYTES[dtype], length * HIDDEN_SIZE
    raw = [draw.bytes(codes + 4 * length if form == "fp8" else codes * width) for _ in LAYERS]
    elements = [np.frombuffer(layer, np.uint8).reshape(-1, width) for layer in raw]
    planes = [half.tobytes() for layer in elements for half in (layer[:, -1], layer[:, :-1])]
    cells = {"none": raw, "planes": planes}.get(form) or [b for x in raw for b in (x[:codes], x[codes:])]
    row = {
        "sample_id": f"{number:02x}-\u6c34\U0001f30a" * (1 + number % 3),
        "source_id": None if number % 3 == 1 else "\u00e9t\u00e9 " * (number % 4),
        "num_tokens": length,
        "prompt_tokens": length // 2,
        "hidden_size": HIDDEN_SIZE,
        "input_ids": draw.integers(-(2**31), 2**31, length).tolist(),
        "loss_mask": draw.integers(0, 256, length).tolist(),
        "checksums": [xxhash.xxh3_64_intdigest(layer) for layer in raw],
    }
    return row | dict(zip(layer_columns(LAYERS, form), cells, strict=True)), raw


def tables_of(schema, rows):
    return [pa.Table.from_pylist([row], schema=schema) for row in rows]


def cells_of(schema, row):
    """Give a row's values as the writer does."""
    numbers = {"input_ids": np.int32, "loss_mask": np.uint8, "checksums": np.uint64}
    for name in schema.names:
        cell = row[name]
        if isinstance(cell, bytes):
            yield np.frombuffer(cell, np.uint8)
        else:
            yield np.array(cell, numbers[name]) if name in numbers else cell


def framed(schema, rows, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "ALIGNED_BYTES", ALIGNED_BYTES)
        file = ShardFile(path, schema)
        for row in rows:
            file.write_row(pages(schema, cells_of(schema, row)))
        xxh3, footer_hash, num_bytes = file.end()
    data = path.read_bytes()
    assert (xxh3, footer_hash, num_bytes) == (xxh3_of(path), footer_xxh3(data), len(data))
    return data


def by_pyarrow(schema, tables):
    file = io.BytesIO()
    with pq.ParquetWriter(file, schema, **writer_options(schema)) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=1)
    return file.getvalue()


def read(data):
    return pq.read_table(pa.BufferReader(data))


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def written(request, tmp_path_factory):
    """The same rows as a file of ours and as pyarrow's; `raw` has a row's layers before any planes."""
    schema = schema_of(*request.param)
    made = [random_row(number, length, *request.param) for number, length in enumerate(LENGTHS)]
    rows = [row for row, _ in made]
    tables = tables_of(schema, rows)
    path = tmp_path_factory.mktemp("framed") / "shard.parquet"
    ours, theirs = framed(schema, rows, path), by_pyarrow(schema, tables)
    raw = [layers for _, layers in made]
    return SimpleNamespace(schema=schema, rows=rows, raw=raw, ours=ours, theirs=theirs, path=path)


def chunks_of(data) -> Iterator[dict]:
    """What pyarrow says of each column chunk, row by row in file order."""
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    for row in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            yield metadata.row_group(row).column(column).to_dict()


LISTS = ("input_ids", "loss_mask", "checksums")
"""pyarrow packs their levels otherwise."""


def test_file_and_chunks_are_those_that_pyarrow_would_have_written(written):
    tables = [read(data) for data in (written.ours, written.theirs)]
    tables[0].validate(full=True)
    assert tables[0].equals(tables[1], check_metadata=True)
    assert tables[0].schema.equals(written.schema, check_metadata=True)
    our, their = (pq.ParquetFile(pa.BufferReader(data)) for data in (written.ours, written.theirs))
    assert our.schema.equals(their.schema)
    for name in ("metadata", "num_rows", "num_columns", "num_row_groups", "format_version"):
        assert getattr(our.metadata, name) == getattr(their.metadata, name), name
    for chunk, other in zip(chunks_of(written.ours), chunks_of(written.theirs), strict=True):
        moved = {"data_page_offset"}
        if chunk["path_in_schema"].split(".")[0] in LISTS:
            moved |= {"total_compressed_size", "total_uncompressed_size"}
        else:
            assert bytes_of(written.ours, chunk) == bytes_of(written.theirs, other), chunk
        for name in chunk.keys() - moved:
            assert chunk[name] == other[name], (chunk["path_in_schema"], name)


def bytes_of(data, chunk):
    return data[chunk["data_page_offset"] :][: chunk["total_compressed_size"]]


def test_chunks_follow_one_another_and_only_long_layers_begin_on_a_blocks_border(written):
    end, chunks = len(MAGIC), chunks_of(written.ours)
    for row in written.rows:
        for name in written.schema.names:
            chunk = next(chunks)
            begin, num_bytes = chunk["data_page_offset"], chunk["total_compressed_size"]
            in_place = name.startswith("layer_") and not name.endswith("_hi")
            if in_place and len(row[name]) >= ALIGNED_BYTES:
                assert 0 <= begin - end < BLOCK_BYTES
                assert (begin + num_bytes - len(row[name])) % BLOCK_BYTES == 0
            else:
                assert begin == end
            end = begin + num_bytes
    assert end == len(written.ours) - 8 - int.from_bytes(written.ours[-8:-4], "little")


def test_the_shard_reader_gets_every_row_and_layer_bit_for_bit(written):
    with open_shard(written.path) as reader:
        about = reader.provenance.identity
        for number, (row, raw) in enumerate(zip(written.rows, written.raw, strict=True)):
            light = reader.light[number]
            assert (light.sample_id, light.source_id) == (row["sample_id"], row["source_id"])
            assert light.input_ids.tolist() == row["input_ids"]
            assert light.loss_mask.tolist() == row["loss_mask"]
            for layer_id, expected in zip(LAYERS, raw, strict=True):
                assert b"".join(reader.layer_bytes(number, layer_id)) == expected
                if about.compression != "fp8":
                    states_TH = read_states(reader, number, layer_id)
                    assert states_TH.dtype == getattr(torch, about.dtype)
                    assert states_TH.contiguous().view(torch.uint8).numpy().tobytes() == expected


def test_duckdb_reads_the_same_rows(written):
    with duckdb.connect() as connection:
        found = connection.read_parquet(str(written.path))
        one = found.filter(f"sample_id = '{written.rows[3]['sample_id']}'")
        for relation, rows in ((found, written.rows), (one, written.rows[3:4])):
            assert [dict(zip(found.columns, row, strict=True)) for row in relation.fetchall()] == rows


def test_polars_reads_the_same_rows(written):
    rows, lazy = written.rows, pl.scan_parquet(written.path)
    assert pl.read_parquet(written.path).to_dicts() == rows
    assert lazy.filter(pl.col("sample_id") == rows[4]["sample_id"]).collect().to_dicts() == [rows[4]]
    assert lazy.filter(pl.col("num_tokens") > 999).collect().to_dicts() == [rows[-1]]


@pytest.mark.parametrize("streaming", [True, False])
def test_datasets_reads_the_same_rows(written, tmp_path, streaming):
    found = datasets.load_dataset(
        "parquet", data_files=str(written.path), split="train", streaming=streaming, cache_dir=str(tmp_path)
    )
    assert list(found) == written.rows


@pytest.mark.parametrize(("column", "row"), [("sample_id", 2), ("num_tokens", 4)])
def test_a_filtered_dataset_takes_the_row_by_its_statistics(written, column, row):
    data = pyarrow.dataset.dataset(written.path)
    wanted = pyarrow.dataset.field(column) == written.rows[row][column]
    assert data.to_table(filter=wanted).to_pylist() == [written.rows[row]]
    (fragment,) = data.get_fragments()
    assert len(fragment.subset(filter=wanted).row_groups) == 1


EMPTY = {"sample_id": "", "source_id": None, "input_ids": [], "loss_mask": [], "checksums": []}


def test_empty_values_are_framed_as_pyarrow_writes_them(tmp_path):
    schema = schema_of()
    row = random_row(0, 1)[0] | EMPTY | dict.fromkeys(layer_columns(LAYERS, "none"), b"")
    ours = framed(schema, [row], tmp_path / "file")
    assert read(ours).equals(read(by_pyarrow(schema, tables_of(schema, [row]))), check_metadata=True)


@pytest.mark.parametrize("column", ["sample_id", "input_ids", "layer_1_hi", "layer_1_lo"])
def test_a_value_beyond_the_limit_is_refused_by_name(tmp_path, monkeypatch, column):
    schema = schema_of("bfloat16", "planes")
    row, _ = random_row(0, 9, "bfloat16", "planes")
    num_bytes = {"sample_id": 10, "input_ids": 36}.get(column, 144)
    empty = dict.fromkeys(layer_columns(LAYERS, "planes"), b"") | EMPTY
    row |= {name: cell for name, cell in empty.items() if name != column}
    monkeypatch.setattr(framing, "MAX_VALUE_BYTES", num_bytes)
    framed(schema, [row], tmp_path / "file")
    monkeypatch.setattr(framing, "MAX_VALUE_BYTES", num_bytes - 1)
    with pytest.raises(ValueError, match=f"^{column}: {num_bytes} bytes"):
        framed(schema, [row], tmp_path / "file")


def test_the_pages_of_a_row_keep_no_memory_but_what_will_be_written():
    """Neither a plane beyond the scratch memory that threads keep, nor what zstd asked for at most."""
    schema, (row, _) = schema_of(form="planes"), random_row(0, 1, form="planes")
    cells = zip(schema.names, cells_of(schema, row), strict=True)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        kept = list(
            pages(schema, (np.zeros(2**25, np.uint8) if "_hi" in name else cell for name, cell in cells))
        )
        assert tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before < 2**20
    finally:
        tracemalloc.stop()
    assert len(kept) == len(schema)


def test_a_row_with_a_cell_too_few_and_a_column_that_no_shard_has_are_refused(tmp_path):
    schema = schema_of()
    file = ShardFile(tmp_path / "file", schema)
    *cells, _ = cells_of(schema, random_row(0, 2)[0])
    with pytest.raises(ValueError, match="shorter"):
        file.write_row(pages(schema, cells))
    file.close()
    with pytest.raises(KeyError):
        ShardFile(tmp_path / "file", pa.schema([pa.field("num_tokens", pa.float32())]))
