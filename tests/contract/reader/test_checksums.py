"""A layer that is checked is the one that was captured, or its shard, row and number are named."""

import shutil
from pathlib import Path

import pytest
import torch

from service.reader import Eagle3, QuarryDataset, QuarryStream, ReaderError
from tests.contract.reader.conftest import finished
from tests.support.file_plants import flip_bit, page, rewrite, sign_again
from tests.support.finished_job import JOB, a_dataset

ROW, LAYER = 2, 5


@pytest.fixture(scope="module", params=["none", "planes", "fp8"])
def sound(request, tmp_path_factory, target) -> Path:
    storage = {"shard_bytes": 262_144, "compression": request.param}
    return finished(tmp_path_factory.mktemp("sound"), target, storage=storage)


def copied(dataset: Path, folder: Path) -> tuple[Path, Path]:
    """Return a copy of a dataset and its first shard."""
    shutil.copytree(dataset, folder)
    return folder, min(folder.glob("data/*/*.parquet"))


def stored_in(rows: QuarryDataset, shard: Path) -> int:
    """Return the number of the row `ROW` of a shard."""
    places = zip(rows.index["shard"].to_pylist(), rows.index["row"].to_pylist(), strict=True)
    return list(places).index((f"data/{shard.parent.name}/{shard.name}", ROW))


def test_a_sound_dataset_is_read_the_same(sound):
    checked = QuarryDataset(sound, check=True)
    for row, same in zip(checked, QuarryDataset(sound), strict=True):
        assert torch.equal(row.read(row.layer_ids), same.read(same.layer_ids))
        assert torch.equal(row.last_normed(), same.last_normed())
    assert checked.mapped(0, checked.about.layer_ids) is None


def test_a_flipped_bit_is_found_where_the_layer_is_read(sound, tmp_path):
    folder, shard = copied(sound, tmp_path / "copy")
    rows = QuarryDataset(folder)
    number, (*_, layer_id, last) = stored_in(rows, shard), rows.about.layer_ids
    end = {"none": "", "planes": "_lo", "fp8": "_scale"}[rows.about.compression]
    flip_bit(shard, page(shard, ROW, f"layer_{layer_id}{end}")[1] - 2)
    assert not torch.equal(rows[number].layer(layer_id), QuarryDataset(sound)[number].layer(layer_id))
    checked = QuarryDataset(folder, check=True)
    for row in checked:
        row.layer(last)
        if row.sample_id != rows[number].sample_id:
            row.auxiliary()
    told = rf"{shard.name}: row {ROW}: layer {layer_id}: its bytes have xxh3 [0-9a-f]+, [0-9a-f]+ is stored"
    for read in (lambda row: row.layer(layer_id), lambda row: row.auxiliary()):
        with pytest.raises(ReaderError, match=told):
            read(checked[number])


@pytest.mark.slow
def test_a_checksum_that_is_damaged_agrees_with_nothing(plain, tmp_path):
    folder, shard = copied(plain, tmp_path / "copy")
    rows = QuarryDataset(folder, check=True)
    flip_bit(shard, page(shard, ROW, "checksums")[1] - 6)
    with pytest.raises(ReaderError, match=rf"{shard.name}: row {ROW}"):
        rows[stored_in(rows, shard)].read(rows.about.layer_ids)


def test_a_shard_with_its_rows_in_another_order_is_refused(tmp_path):
    """As another attempt at the unit may have written it: of the same length, and right by itself."""
    (entry,) = a_dataset(tmp_path, num_units=1, rows=4).shards
    rewrite(tmp_path / entry.path, lambda rows: rows)
    sign_again(tmp_path)
    QuarryDataset(tmp_path)[0].layer(2)
    rewrite(tmp_path / entry.path, lambda rows: [rows[3], *rows[1:3], rows[0]])
    told = rf"row 0 of {entry.path} holds sample {JOB}-0-3, the index says {JOB}-0-0"
    with pytest.raises(ReaderError, match=told):
        QuarryDataset(tmp_path, check=True)[0].layer(2)


def test_a_stream_checks_as_its_dataset_does(plain, tmp_path):
    folder, shard = copied(plain, tmp_path / "copy")
    flip_bit(shard, page(shard, ROW, f"layer_{LAYER}")[1] - 2)
    options = {"rank": 0, "world_size": 1, "shuffle": False}
    list(QuarryStream(QuarryDataset(folder, Eagle3()), **options))
    list(QuarryStream(QuarryDataset(folder, Eagle3(layers=(2, 4)), check=True), **options))
    with pytest.raises(ReaderError, match=f"row {ROW}: layer {LAYER}: its bytes"):
        list(QuarryStream(QuarryDataset(folder, Eagle3(), check=True), **options))
    job_id = next(iter(QuarryDataset(folder).manifests))
    with pytest.raises(ReaderError, match=f"row {ROW}: layer {LAYER}: its bytes"):
        list(QuarryStream.follow(folder, job_id, Eagle3(), rank=0, world_size=1, check=True))


def test_an_index_whose_bytes_are_not_those_sealed_is_named(plain, tmp_path):
    folder, _ = copied(plain, tmp_path / "copy")
    index = min(folder.glob("index/*/*.parquet"))
    flip_bit(index, page(index, 0, "input_ids")[1] - 3)
    told = rf"index/.*/{index.name} has sha256 [0-9a-f]+, [0-9a-f]+ was sealed"
    with pytest.raises(ReaderError, match=told):
        QuarryDataset(folder, check=True)
    follower = QuarryStream.follow(folder, index.parent.name, rank=0, world_size=1, check=True)
    with pytest.raises(ReaderError, match=told):
        next(iter(follower))
