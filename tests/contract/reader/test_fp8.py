"""A lossy dataset is read as the product of codes and scales, layer by layer."""

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from schemas.dataset.files import LocalFile
from schemas.dataset.shard import Shard
from service.proof.verify import verify_dataset
from service.reader import Eagle3, QuarryDataset
from tests.contract.reader.conftest import finished
from tests.support.fake_engine import states_TH
from tests.support.plans import identity
from tests.support.shards import stored_bytes

LAYERS, HIDDEN_SIZE = (2, 4, 5, 8), 64
ABOUT = identity(hidden_size=HIDDEN_SIZE, compression="fp8")


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    storage = {"shard_bytes": 262_144, "compression": "fp8"}
    return finished(tmp_path_factory.mktemp("lossy"), target, storage=storage)


def test_a_byte_an_element_and_four_a_token_and_layer_are_stored(lossy):
    report = verify_dataset(lossy)
    assert report.ok, report.findings
    stored = sum(
        len(value)
        for path in lossy.glob("data/*/*.parquet")
        for row in pq.read_table(path).to_pylist()
        for name, value in row.items()
        if name.startswith("layer_")
    )
    assert stored == report.tokens * len(LAYERS) * (HIDDEN_SIZE + 4)


def due(captured_TH: torch.Tensor) -> torch.Tensor:
    """Return what is stored of captured states, by the definition of the format."""
    raw = bytearray(stored_bytes(captured_TH, ABOUT))
    num_codes = captured_TH.numel()
    codes = torch.frombuffer(raw, dtype=torch.float8_e4m3fn, count=num_codes).double()
    scales_T = torch.frombuffer(raw[num_codes:], dtype=torch.float32).double()
    return (codes.view(captured_TH.shape) * scales_T[:, None]).float().to(captured_TH.dtype)


@pytest.mark.parametrize("memory_map", [False, True])
def test_every_state_is_its_code_times_its_scale(lossy, memory_map):
    rows = QuarryDataset(lossy, memory_map=memory_map)
    for row in rows:
        for layer_id in LAYERS:
            captured_TH = states_TH(row.input_ids.tolist(), layer_id, HIDDEN_SIZE, "bfloat16")
            assert torch.equal(row.layer(layer_id), due(captured_TH))
        side_by_side = torch.cat([row.layer(layer_id) for layer_id in row.auxiliary_ids], dim=-1)
        assert torch.equal(row.auxiliary(), side_by_side)


def test_a_view_is_made_of_them(lossy, plain):
    near, exact = (QuarryDataset(folder, view=Eagle3())[3]["hidden_states"] for folder in (lossy, plain))
    assert near.shape == exact.shape
    assert 0 < float((near.float() - exact.float()).norm() / exact.float().norm()) < 0.04


@dataclass
class Watched:
    """A file that remembers what was read of it."""

    file: LocalFile
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def read(self, offset, num_bytes):
        self.ranges.append((offset, num_bytes))
        return self.file.read(offset, num_bytes)


def test_one_layer_costs_its_codes_and_scales_and_one_read(lossy):
    rows = QuarryDataset(lossy)
    row = rows[0]
    watched = Watched(LocalFile(lossy / rows.shard_of(0)))
    Shard(watched, "a shard").layer_bytes(0, 4, row.num_tokens)
    ((_, num_bytes),) = watched.ranges
    stored = row.num_tokens * (HIDDEN_SIZE + 4)
    assert stored < num_bytes < stored + 8192
