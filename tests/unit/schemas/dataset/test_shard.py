import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from schemas.dataset import shard
from schemas.dataset.columns import METADATA_KEY, shard_schema
from schemas.dataset.errors import DatasetError
from schemas.dataset.files import LocalFile
from schemas.dataset.shard import Shard, open_shard
from schemas.dataset.states import is_lossy, last_state, misfit_tokens, read_states, states_of
from tests.support.parquet import writer_options
from tests.support.plans import identity, provenance
from tests.support.shards import ShardRow, stored_bytes, write_shard

LAYERS = (0, 3, 8)


def random_rows(dtype: str, lengths: tuple[int, ...] = (1, 5, 130), hidden_size: int = 16) -> list[ShardRow]:
    """Random bit patterns, NaN payloads and trailing zeros included."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate(lengths):
        states = {}
        for layer_id in LAYERS:
            width = torch.finfo(getattr(torch, dtype)).bits // 8
            raw = torch.randint(0, 256, (length * hidden_size * width,), generator=draw, dtype=torch.uint8)
            raw[-width:] = 0
            states[layer_id] = raw.view(getattr(torch, dtype)).view(length, hidden_size)
        ids = torch.randint(0, 500, (length,), generator=draw).tolist()
        rows.append(ShardRow(f"s{number}", None, length, ids, [1] * length, states))
    return rows


def read_rows(path: Path) -> int:
    with open_shard(path) as reader:
        return len(reader.light)


@pytest.mark.parametrize("behind", ["another file", "none"])
def test_footer_and_rows_are_of_the_file_that_was_opened(tmp_path, behind):
    """As where the service stored a unit meanwhile and removed its file, or a folder is copied anew."""
    first, second = (random_rows("bfloat16", lengths) for lengths in [(1, 5), (5, 1)])
    write_shard(tmp_path / "s.parquet", first, provenance(identity(layer_ids=LAYERS, hidden_size=16)))
    write_shard(tmp_path / "other", second, provenance(identity(layer_ids=LAYERS, hidden_size=16)))
    with closing(LocalFile(tmp_path / "s.parquet")) as file:
        if behind == "none":
            (tmp_path / "s.parquet").unlink()
        else:
            (tmp_path / "other").rename(tmp_path / "s.parquet")
        reader = Shard(file, "s.parquet")
        assert [light.num_tokens for light in reader.light] == [1, 5]
        for row, written in enumerate(first):
            assert torch.equal(bits(read_states(reader, row, 3)), bits(written.states[3]))


def bits(states_TH: torch.Tensor) -> torch.Tensor:
    return states_TH.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("length", "hidden_size", "change", "message"),
    [
        (5, 16, lambda states: states[:-1], "row 0: layer_0 takes"),
        # A few bytes more still fit between page header and payload; the value's own length tells.
        (1, 2, lambda states: states.repeat(3, 1), "not one uncompressed"),
    ],
)
def test_a_layer_of_another_length_is_named(tmp_path, length, hidden_size, change, message):
    (row,) = random_rows("bfloat16", lengths=(length,), hidden_size=hidden_size)
    changed = {layer_id: change(states) for layer_id, states in row.states.items()}
    about = identity(layer_ids=LAYERS, hidden_size=hidden_size)
    write_shard(tmp_path / "s.parquet", [replace(row, states=changed)], provenance(about))
    with open_shard(tmp_path / "s.parquet") as reader, pytest.raises(DatasetError, match=message):
        read_states(reader, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1] * 4}, r"row 0 \(s1\): loss_mask is 4, expected 5"),
        ({"checksums": [1, 2]}, r"row 0 \(s1\): checksums is 2, expected 3"),
        ({"prompt_tokens": 6}, r"prompt_tokens 6"),
    ],
)
def test_light_columns_that_disagree_in_length_are_named(tmp_path, change, message):
    row = replace(random_rows("bfloat16")[1], **change)
    write_shard(tmp_path / "s.parquet", [row], provenance(identity(layer_ids=LAYERS)))
    with open_shard(tmp_path / "s.parquet") as reader, pytest.raises(DatasetError, match=message):
        _ = reader.light


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 and nothing like a footer PAR1"])
def test_a_file_that_is_not_parquet_is_named(tmp_path, content):
    (tmp_path / "s.parquet").write_bytes(content)
    with pytest.raises(DatasetError, match=r"s\.parquet: the file cannot be opened"):
        read_rows(tmp_path / "s.parquet")


def metadata(**changes: object) -> dict[bytes, bytes]:
    document = json.loads(provenance(identity(layer_ids=LAYERS)).model_dump_json())
    document["identity"] |= changes
    return {METADATA_KEY: json.dumps(document).encode()}


@pytest.mark.parametrize(
    ("layer_ids", "metadata", "message"),
    [
        (LAYERS, {}, "no 'quarry' document"),
        (LAYERS, {METADATA_KEY: b'{"job_id": 1}'}, "not a shard of this version: job_id: "),
        (
            LAYERS,
            metadata(schema_version=1, old=1),
            "identity: format version 1, expected 2: capture .* anew",
        ),
        (LAYERS, metadata(schema_version=3), "version 3, expected 2: .* read it with the version that made"),
        (LAYERS, metadata(compression="fp4"), r"not a shard of this version: identity\.compression: "),
        ((0, 3, 7), metadata(), "columns are not those"),
    ],
)
def test_a_shard_of_another_provenance_is_refused(tmp_path, layer_ids, metadata, message):
    schema = shard_schema(layer_ids, 16, "bfloat16", "none").with_metadata(metadata)
    pq.write_table(schema.empty_table(), tmp_path / "s.parquet")
    with pytest.raises(DatasetError, match=message):
        read_rows(tmp_path / "s.parquet")


def test_several_rows_in_a_row_group_are_refused(tmp_path):
    rows = random_rows("bfloat16", lengths=(2, 3))
    write_shard(tmp_path / "s.parquet", rows, provenance(identity(layer_ids=LAYERS)))
    table = pq.read_table(tmp_path / "s.parquet")
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DatasetError, match="2 rows in 1 row groups"):
        read_rows(tmp_path / "t.parquet")


def compress(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=1)


def lengthen(path: Path) -> None:
    table = pq.read_table(path)
    index = table.schema.get_field_index("layer_0_hi")
    field = table.schema.field(index)
    table = table.set_column(index, field, pa.array([b"123456"] * len(table), field.type))
    with pq.ParquetWriter(path, table.schema, **writer_options(table.schema)) as file:
        file.write_table(table, row_group_size=1)


def crowd(path: Path) -> None:
    """Put both rows into one row group, and none into another."""
    table = pq.read_table(path)
    with pq.ParquetWriter(path, table.schema, **writer_options(table.schema)) as file:
        file.write_table(table)
        file.write_table(table[:0])


@pytest.mark.parametrize(
    ("compression", "damage", "message"),
    [
        ("none", compress, "row 0: layer_0 is compressed"),
        ("planes", lengthen, "row 0: layer 0 cannot be read: .*too small"),
        ("planes", crowd, "row 0: layer 0 cannot be read: .*too small"),
    ],
)
def test_a_value_that_is_stored_in_another_way_is_named(tmp_path, compression, damage, message):
    path, rows = tmp_path / "s.parquet", random_rows("bfloat16", lengths=(1, 1), hidden_size=2)
    write_shard(path, rows, provenance(identity(layer_ids=LAYERS, hidden_size=2, compression=compression)))
    damage(path)
    with open_shard(path) as reader, pytest.raises(DatasetError, match=message):
        reader.layer_bytes(0, 0)


def test_codes_and_scales_that_do_not_lie_side_by_side_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "_MAX_GAP_BYTES", 0)
    about = identity(layer_ids=LAYERS, compression="fp8")
    write_shard(tmp_path / "s.parquet", random_rows("bfloat16"), provenance(about))
    with (
        open_shard(tmp_path / "s.parquet") as reader,
        pytest.raises(DatasetError, match="row 0: layer_0 and layer_0_scale do not lie side by side"),
    ):
        reader.layer_bytes(0, 0)


def test_states_in_fp8_come_back_as_codes_times_their_scales(tmp_path):
    draw = torch.Generator().manual_seed(4)
    captured = {k: torch.randn((9, 16), generator=draw).bfloat16() * 10**k for k in LAYERS}
    about = identity(layer_ids=LAYERS, compression="fp8")
    write_shard(
        tmp_path / "s.parquet", [ShardRow("s", None, 9, [1] * 9, [1] * 9, captured)], provenance(about)
    )
    with open_shard(tmp_path / "s.parquet") as reader:
        assert is_lossy(reader.provenance.identity)
        for layer_id in LAYERS:
            layer = reader.layer_bytes(0, layer_id)
            codes, scales = layer
            assert codes.tobytes() + scales.tobytes() == stored_bytes(captured[layer_id], about)
            values = torch.from_numpy(codes.reshape(9, 16)).view(torch.float8_e4m3fn).double()
            scales_T = torch.from_numpy(scales.copy()).view(torch.float32).double()
            expected = (values * scales_T[:, None]).float().bfloat16()
            assert torch.equal(bits(states_of(layer, about)), bits(expected))
            last = last_state(layer, about)
            assert torch.equal(bits(last.state_H), bits(expected[-1]))
            off_H = (expected[-1].float() - captured[layer_id][-1].float()).abs()
            assert bool((off_H <= last.half_H + expected[-1].float().abs() * 2.0**-8).all())
            assert not bool(misfit_tokens(layer, about).any())


@pytest.mark.parametrize("compression", ["none", "planes", "fp8"])
def test_damaged_files_never_raise_anything_but_dataset_broken(tmp_path, compression):
    """300 copies with a flipped bit before the footer, or cut short: each reads back or is named."""
    about = identity(layer_ids=LAYERS, compression=compression)
    write_shard(tmp_path / "s.parquet", random_rows("bfloat16"), provenance(about))
    whole = (tmp_path / "s.parquet").read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    draw = random.Random(9)
    broken = 0
    for _ in range(300):
        data = bytearray(whole)
        data[draw.randrange(4, footer)] ^= 1 << draw.randrange(8)
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        (tmp_path / "t.parquet").write_bytes(data)
        try:
            with open_shard(tmp_path / "t.parquet") as reader:
                for row in range(len(reader.light)):
                    for layer_id in reader.provenance.identity.layer_ids:
                        read_states(reader, row, layer_id)
        except DatasetError as error:
            assert "t.parquet" in str(error)
            broken += 1
    assert broken > 60
