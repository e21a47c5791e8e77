"""A lossy dataset is read as the product of codes and scales, layer by layer."""

import torch

from service.reader import QuarryDataset
from tests.support.fake_engine import states_TH
from tests.support.plans import identity
from tests.support.shards import stored_bytes

LAYERS, HIDDEN_SIZE = (2, 4, 5, 8), 64
ABOUT = identity(hidden_size=HIDDEN_SIZE, compression="fp8")


def due(captured_TH: torch.Tensor) -> torch.Tensor:
    """Return what is stored of captured states, by the definition of the format."""
    raw = bytearray(stored_bytes(captured_TH, ABOUT))
    num_codes = captured_TH.numel()
    codes = torch.frombuffer(raw, dtype=torch.float8_e4m3fn, count=num_codes).double()
    scales_T = torch.frombuffer(raw[num_codes:], dtype=torch.float32).double()
    return (codes.view(captured_TH.shape) * scales_T[:, None]).float().to(captured_TH.dtype)


def test_every_state_is_its_code_times_its_scale(lossy):
    rows = QuarryDataset(lossy)
    for row in rows:
        for layer_id in LAYERS:
            captured_TH = states_TH(row.input_ids.tolist(), layer_id, HIDDEN_SIZE, "bfloat16")
            assert torch.equal(row.layer(layer_id), due(captured_TH))
        side_by_side = torch.cat([row.layer(layer_id) for layer_id in row.auxiliary_ids], dim=-1)
        assert torch.equal(row.auxiliary(), side_by_side)
