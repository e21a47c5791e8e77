"""States of a file that is mapped, or read past the page cache, are those that are read."""

import os
import shutil

import pytest
import torch

from benchmarks.dataset import LAYER_IDS, Shape, write_dataset
from schemas.dataset.errors import DatasetError
from schemas.dataset.shard import open_shard
from service.reader import QuarryDataset


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return a dataset whose values are of 1 MiB, so that all of them begin on blocks."""
    root = tmp_path_factory.mktemp("large")
    shape = Shape(num_rows=3, shortest=256, longest=300, hidden_size=2048)
    write_dataset(root / "dataset", root / "scratch", shape)
    return root / "dataset"


def test_states_are_the_same_past_the_page_cache(large):
    direct, cached = (QuarryDataset(large, direct=direct) for direct in (True, False))
    for number in range(len(cached)):
        assert torch.equal(direct[number].auxiliary(), cached[number].auxiliary())
        assert torch.equal(direct[number].last(), cached[number].last())


@pytest.mark.parametrize("layer_ids", [LAYER_IDS, LAYER_IDS[1:3], LAYER_IDS[3:]])
def test_mapped_states_are_those_that_are_read(large, layer_ids):
    rows = QuarryDataset(large)
    for number in range(len(rows)):
        states_TLH = rows.mapped(number, layer_ids)
        assert torch.equal(states_TLH.flatten(1), rows.row(number).read(layer_ids))


def test_layers_at_uneven_distances_are_not_mapped(large):
    assert QuarryDataset(large).mapped(0, (LAYER_IDS[0], LAYER_IDS[1], LAYER_IDS[3])) is None


def test_a_file_that_was_cut_is_not_mapped_behind_its_end(large, tmp_path):
    """That would end the process."""
    (path,) = large.glob("data/*/*.parquet")
    cut = tmp_path / path.name
    shutil.copy(path, cut)
    with open_shard(cut) as shard:
        num_tokens = shard.light[-1].num_tokens
        os.truncate(cut, cut.stat().st_size * 15 // 16)
        with pytest.raises(DatasetError, match="ends behind the file"):
            shard.mapped(len(shard.light) - 1, LAYER_IDS, num_tokens)
