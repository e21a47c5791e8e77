import io
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
import xxhash
from hypothesis import given, settings, strategies as st

from schemas.dataset import framing
from schemas.dataset.columns import METADATA_KEY, layer_columns, shard_schema
from schemas.dataset.framing import MAGIC, Framer
from schemas.dataset.shard import open_shard
from schemas.identity import DTYPE_BYTES
from tests.support.parquet import writer_options
from tests.support.plans import identity, provenance

LAYERS = (1, 5, 8)
HIDDEN_SIZE = 16
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 33, 1000)

KINDS = [(dtype, form) for dtype in DTYPE_BYTES for form in ("none", "planes", "fp8")]
ALIGNMENT = 4096


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


def framed(schema, tables):
    """Write as the direct writer does, with payloads at aligned places and rubbish in the gaps."""
    framer, file = Framer(schema), io.BytesIO()
    file.write(MAGIC)
    for table in tables:
        for column, values in enumerate(table.columns):
            page = framer.page(column, values.combine_chunks())
            name = schema.names[column]
            assert (page.payload is not None) == (name.startswith("layer_") and not name.endswith("_hi"))
            if page.payload is not None:
                file.write(b"\xff" * (-(file.tell() + len(page.head)) % ALIGNMENT))
            begin = file.tell()
            framer.place(page, begin)
            file.write(page.head)
            if page.payload is not None:
                assert file.tell() % ALIGNMENT == 0
                file.write(page.payload)
            assert file.tell() - begin == page.num_bytes
        framer.end_row()
    file.write(framer.tail())
    return file.getvalue()


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
    ours, theirs = framed(schema, tables), by_pyarrow(schema, tables)
    path = tmp_path_factory.mktemp("framed") / "shard.parquet"
    path.write_bytes(ours)
    raw = [layers for _, layers in made]
    return SimpleNamespace(schema=schema, rows=rows, raw=raw, ours=ours, theirs=theirs, path=path)


def varint(stream):
    number = shift = 0
    while (byte := stream.read(1)[0]) > 127:
        number, shift = number | (byte & 127) << shift, shift + 7
    return number | byte << shift


def decoded(stream, kind=12):
    """Read a value in Thrift's compact protocol: a struct, as a dict of its fields by number."""
    if kind in (1, 3):
        return stream.read(1)[0]
    if kind in (4, 5, 6):
        number = varint(stream)
        return number >> 1 ^ -(number & 1)
    if kind == 8:
        return stream.read(varint(stream))
    if kind == 9:
        head = stream.read(1)[0]
        return [decoded(stream, head & 15) for _ in range(varint(stream) if head >> 4 == 15 else head >> 4)]
    fields, number = {}, 0
    while (head := stream.read(1)[0]) != 0:
        number += head >> 4
        fields[number] = head & 15 == 1 if head & 15 in (1, 2) else decoded(stream, head & 15)
    return fields


def footer_of(data):
    assert data[-4:] == MAGIC
    stream = io.BytesIO(data[-8 - int.from_bytes(data[-8:-4], "little") : -8])
    footer = decoded(stream)
    assert stream.read() == b""
    return footer


def chunks_of(data) -> Iterator[dict]:
    for group in footer_of(data)[4]:
        yield from group[1]


def both_chunks(written) -> Iterator[tuple[dict, dict]]:
    yield from zip(chunks_of(written.ours), chunks_of(written.theirs), strict=True)


def bytes_of(data, chunk):
    return data[chunk[3][9] :][: chunk[3][7]]


def test_the_table_is_the_one_that_pyarrow_would_have_written(written):
    table = read(written.ours)
    table.validate(full=True)
    assert table.equals(read(written.theirs), check_metadata=True)
    assert table.schema.equals(written.schema, check_metadata=True)


LISTS = ("input_ids", "loss_mask", "checksums")
"""pyarrow packs their levels otherwise."""


def test_each_chunk_but_a_lists_is_byte_for_byte_the_one_that_pyarrow_writes(written):
    for our, their in both_chunks(written):
        name = our[3][3][0].decode()
        assert name in LISTS or bytes_of(written.ours, our) == bytes_of(written.theirs, their), name


def test_pyarrow_says_the_same_of_each_chunk_of_both_files(written):
    files = [pq.ParquetFile(pa.BufferReader(data)) for data in (written.ours, written.theirs)]
    assert files[0].schema.equals(files[1].schema)
    our, their = (file.metadata for file in files)
    for name in ("metadata", "num_rows", "num_columns", "num_row_groups", "format_version"):
        assert getattr(our, name) == getattr(their, name), name
    for group in range(our.num_row_groups):
        assert our.row_group(group).num_rows == 1
        for column in range(our.num_columns):
            chunk, other = (one.row_group(group).column(column).to_dict() for one in (our, their))
            moved = {"data_page_offset"}
            if chunk["path_in_schema"].split(".")[0] in LISTS:
                moved |= {"total_compressed_size", "total_uncompressed_size"}
            for name in chunk.keys() - moved:
                assert chunk[name] == other[name], (chunk["path_in_schema"], name)


def test_chunks_follow_one_another_and_the_footer(written):
    end = len(MAGIC)
    for chunk in chunks_of(written.ours):
        assert end <= chunk[3][9] < end + ALIGNMENT
        end = chunk[3][9] + chunk[3][7]
    assert end == len(written.ours) - 8 - int.from_bytes(written.ours[-8:-4], "little")


def test_the_shard_reader_gets_every_layer_bit_for_bit(written):
    with open_shard(written.path) as reader:
        for number, (row, raw) in enumerate(zip(written.rows, written.raw, strict=True)):
            light = reader.light[number]
            assert (light.sample_id, light.source_id) == (row["sample_id"], row["source_id"])
            assert light.input_ids.tolist() == row["input_ids"]
            for layer_id, expected in zip(LAYERS, raw, strict=True):
                assert b"".join(reader.layer_bytes(number, layer_id)) == expected


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


def test_a_file_of_many_rows_is_read_whole(tmp_path):
    schema = schema_of()
    rows = [random_row(number, 1 + number % 5)[0] for number in range(300)]
    tables = tables_of(schema, rows)
    path = tmp_path / "shard.parquet"
    path.write_bytes(framed(schema, tables))
    assert pq.read_table(path).equals(read(by_pyarrow(schema, tables)), check_metadata=True)
    assert pl.read_parquet(path).to_dicts() == rows
    with open_shard(path) as reader:
        assert len(reader.light) == 300
        assert reader.layer_bytes(299, 8)[0].tobytes() == rows[299]["layer_8"]


def test_a_file_without_rows_has_its_schema():
    schema = schema_of()
    assert read(framed(schema, [])).equals(schema.empty_table(), check_metadata=True)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
blobs = st.binary(max_size=300)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(KINDS))
def test_any_rows_are_framed_as_pyarrow_writes_them(data, kind):
    schema = schema_of(*kind)
    rows = []
    for number in range(data.draw(st.integers(1, 3))):
        row, _ = random_row(number, data.draw(st.integers(1, 200)), *kind)
        row["sample_id"], row["source_id"] = data.draw(texts), data.draw(texts | st.none())
        row["loss_mask"] = data.draw(st.lists(st.integers(0, 255), max_size=20))
        row["checksums"] = data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=3))
        rows.append(row | {name: data.draw(blobs) for name in layer_columns(LAYERS, kind[1])})
    tables = tables_of(schema, rows)
    ours, theirs = framed(schema, tables), by_pyarrow(schema, tables)
    assert read(ours).equals(read(theirs), check_metadata=True)


@pytest.mark.parametrize("form", ["none", "planes"])
def test_a_row_that_is_a_slice_of_longer_arrays_is_that_row_alone(form):
    schema = schema_of("bfloat16", form)
    table = pa.Table.from_pylist([random_row(k, 5 + k, "bfloat16", form)[0] for k in range(3)], schema=schema)
    assert read(framed(schema, [table.slice(1, 1)])).equals(table.slice(1, 1))


def test_a_layers_payload_is_the_arrays_own_memory():
    schema = schema_of()
    column = schema.get_field_index("layer_5")
    array = pa.array([b"abc", b"defgh"], pa.large_binary())
    page = Framer(schema).page(column, array.slice(1, 1))
    assert page.payload.format == "B"
    assert bytes(page.payload) == b"defgh"
    assert np.frombuffer(page.payload, np.uint8).ctypes.data == array.buffers()[2].address + 3
    assert page.num_bytes == len(page.head) + 5


def test_the_greatest_layer_is_framed_in_few_bytes_and_one_more_byte_is_refused():
    framer, column = Framer(schema_of()), schema_of().get_field_index("layer_1")
    data = pa.py_buffer(np.zeros(framing.MAX_VALUE_BYTES + 1, np.uint8))  # never touched, so never there
    greatest, beyond = (
        pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(np.array([0, size])), data])
        for size in (data.size - 1, data.size)
    )
    page = framer.page(column, greatest)
    assert page.payload.nbytes == framing.MAX_VALUE_BYTES == 2**31 - 2**16
    body, stream = framing.MAX_VALUE_BYTES + 4, io.BytesIO(page.head)
    assert decoded(stream) == {1: 0, 2: body, 3: body, 5: {1: 1, 2: 0, 3: 3, 4: 3}}
    assert stream.read() == framing.MAX_VALUE_BYTES.to_bytes(4, "little")
    assert len(page.head) < 40
    with pytest.raises(ValueError, match=f"^layer_1: {2**31 - 2**16 + 1} bytes"):
        framer.page(column, beyond)


@pytest.mark.parametrize("column", ["sample_id", "input_ids", "layer_1_hi", "layer_1_lo"])
def test_a_value_beyond_the_limit_is_refused_by_name(monkeypatch, column):
    schema = schema_of("bfloat16", "planes")
    (table,) = tables_of(schema, [random_row(0, 9, "bfloat16", "planes")[0]])
    framer, told = Framer(schema), (schema.get_field_index(column), table[column].combine_chunks())
    num_bytes = {"sample_id": 10, "input_ids": 36}.get(column, 144)
    monkeypatch.setattr(framing, "MAX_VALUE_BYTES", num_bytes)
    framer.page(*told)
    monkeypatch.setattr(framing, "MAX_VALUE_BYTES", num_bytes - 1)
    with pytest.raises(ValueError, match=f"^{column}: {num_bytes} bytes"):
        framer.page(*told)


@pytest.mark.parametrize(
    ("values", "kind"), [([1, 2], "int32"), ([], "int32"), ([None], "int32"), ([1], "int64")]
)
def test_anything_but_one_value_of_the_columns_type_is_refused(values, kind):
    with pytest.raises(ValueError, match=r"^num_tokens takes one int32"):
        Framer(schema_of()).page(2, pa.array(values, kind))


def test_a_row_cannot_end_before_its_last_column():
    schema = schema_of()
    framer, (table,) = Framer(schema), tables_of(schema, [random_row(0, 2)[0]])
    pages = [framer.page(column, values.combine_chunks()) for column, values in enumerate(table.columns)]
    for page in pages[:-1]:
        framer.place(page, 4)
    with pytest.raises(ValueError, match="without checksums"):
        framer.end_row()
    with pytest.raises(ValueError, match="in a row"):
        framer.tail()
    with pytest.raises(ValueError, match="layer_8 is placed"):
        framer.place(pages[-2], 4)


@pytest.mark.parametrize(
    ("kind", "nullable"), [(pa.float32(), False), (pa.int32(), True), (pa.list_(pa.int32()), False)], ids=str
)
def test_a_column_that_no_shard_has_is_refused(kind, nullable):
    with pytest.raises(ValueError, match=r"^num_tokens: no shard has"):
        Framer(pa.schema([pa.field("num_tokens", kind, nullable)]))
