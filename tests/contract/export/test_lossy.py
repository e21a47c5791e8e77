"""An export of a lossy dataset holds the states in the model's dtype, as the reader gives them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from service.export.run import export
from service.reader import QuarryDataset
from tests.contract.export.conftest import AUX, LAST, truths_of, wanted
from tests.contract.reader.conftest import finished


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    storage = {"shard_bytes": 262_144, "compression": "fp8"}
    return finished(tmp_path_factory.mktemp("lossy"), target, storage=storage)


def test_speculators_gets_codes_times_scales_in_the_models_dtype(lossy, tmp_path):
    export(str(lossy), tmp_path / "out", wanted("speculators"))
    rows = QuarryDataset(lossy)
    for number, truth in enumerate(truths_of(lossy)):
        states = load_file(tmp_path / f"out/hidden_states/hs_{number}.safetensors")["hidden_states"]
        due = torch.stack([rows.row(number).layer(layer_id) for layer_id in (*AUX, LAST)], dim=1)
        assert states.dtype is torch.bfloat16
        assert torch.equal(states, due)
        captured = torch.stack([truth.layer(layer_id) for layer_id in (*AUX, LAST)], dim=1).float()
        assert 0 < float((states.float() - captured).norm() / captured.norm()) < 0.04
