"""A sealed unit whose states are stored lossily, held against its model."""

from dataclasses import replace

import pytest

from service.errors import StatesWrong, WriteFailed
from tests.support.reference_models import MODEL_TYPES, NUM_LAYERS
from tests.support.shards import LENGTHS, seal_attempt, stored_bytes
from tests.unit.proof.test_checks import make_unit


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_right_states_agree_with_their_model_and_another_rows_do_not(tmp_path, model_type, dtype):
    unit = make_unit(tmp_path, model_type, dtype, compression="fp8")
    assert unit.check(unit.seal()).logit_rows == len(LENGTHS)
    rows = dict(enumerate(unit.captured.rows))
    row, other = rows[2], rows[4]
    last = other.states[NUM_LAYERS][-len(row.input_ids) :]
    rows[2] = replace(row, states=row.states | {NUM_LAYERS: last})
    wrong = seal_attempt(tmp_path / "wrong", unit.captured.provenance, rows)
    with pytest.raises(StatesWrong, match=r"by the stored states|the stored states say|log-probability"):
        replace(unit, folder=tmp_path / "wrong").check(wrong)


def test_a_bit_of_a_scale_is_a_file_that_is_not_what_was_written(tmp_path):
    unit = make_unit(tmp_path, "llama", "bfloat16", compression="fp8")
    receipt = unit.seal()
    path = unit.folder / receipt.file
    data = bytearray(path.read_bytes())
    row = unit.captured.rows[4]
    layer_id = min(row.states)
    wanted = row.states[layer_id]
    raw = stored_bytes(wanted, unit.captured.about)
    scales = raw[wanted.numel() :]
    at = data.find(scales)
    assert at > 0
    data[at + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(WriteFailed, match="xxh3"):
        unit.check(receipt)
