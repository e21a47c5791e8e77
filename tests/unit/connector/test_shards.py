from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import xxhash

from connector.repeats import RepeatCheck
from connector.rowcheck import StatesWrongError
from connector.shards import UnitWriter
from connector.wire import DrainJob, RowRef, hash_ids
from schemas.dataset.codecs.planes import merge_planes
from schemas.dataset.columns import METADATA_KEY, shard_schema
from schemas.dataset.seal import temporary
from schemas.identity import Provenance
from schemas.names import PLAN_FILE, attempt_dir
from tests.support.fake_engine import states_TH
from tests.support.parquet import footer_xxh3, xxh3_of
from tests.support.plans import JOB, identity, order, random_ids, rank_config, write_plan
from tests.support.shards import stored_bytes
from tests.support.sums import token_sums


def job(about, ids, row, *, generated=(), **change):
    ref = RowRef(order(about, 1).attempt_id, row, len(ids))
    made = DrainJob(f"r{row}", ref, len(ids) + len(generated), (), hash_ids(ids), tuple(generated))
    return replace(made, **change)


def states(about, ids):
    return torch.stack([states_TH(list(ids), k, about.hidden_size, about.dtype) for k in about.layer_ids])


def writer(tmp_path, about, ids, *, rank=0, num_ranks=1):
    write_plan(tmp_path, ids)
    return opened(tmp_path, about, len(ids), rank, num_ranks)


def opened(tmp_path, about, num_rows, rank=0, num_ranks=1):
    return UnitWriter(order(about, num_rows), rank_config(tmp_path, rank, num_ranks), RepeatCheck(3, 4096))


def write(unit, about, ids, row, states_LTH=None, **change):
    """Write a row of the plan as the writer thread does, its slab as it was copied."""
    one = ids[row]
    if states_LTH is None:
        states_LTH = states(about, [*one, *change.get("generated", ())])
    unit.write(job(about, one, row, **change), states_LTH, token_sums(states_LTH))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compression", ["none", "planes", "fp8"])
def test_a_sealed_shard_holds_every_byte_of_every_row(tmp_path, dtype, compression):
    about = identity(dtype=dtype, compression=compression)
    ids = random_ids([1, 5, 33])
    unit = writer(tmp_path, about, ids)
    for row in (2, 0, 1):
        write(unit, about, ids, row)
    assert unit.complete
    receipt = unit.seal()
    path = tmp_path / attempt_dir(JOB, 0, 1) / receipt.file
    assert receipt.bytes == path.stat().st_size
    assert receipt.xxh3 == xxh3_of(path) == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert receipt.footer_xxh3 == footer_xxh3(path.read_bytes())
    assert receipt.rows == (2, 0, 1)
    file = pq.ParquetFile(path)
    assert file.schema_arrow.equals(
        shard_schema(about.layer_ids, about.hidden_size, dtype, compression), check_metadata=False
    )
    assert file.num_row_groups == 3
    assert Provenance.model_validate_json(file.schema_arrow.metadata[METADATA_KEY]).identity == about
    width = 4 if dtype == "float32" else 2
    for group, row in enumerate(receipt.rows):
        stored = file.read_row_group(group).to_pylist()[0]
        assert stored["input_ids"] == ids[row]
        assert stored["num_tokens"] == stored["prompt_tokens"] == len(ids[row])
        for index, k in enumerate(about.layer_ids):
            expected = stored_bytes(states(about, ids[row])[index], about)
            if compression == "planes":
                hi, lo = (np.frombuffer(stored[f"layer_{k}_{plane}"], np.uint8) for plane in ("hi", "lo"))
                raw = merge_planes(hi, lo, width).tobytes()
            elif compression == "fp8":
                raw = stored[f"layer_{k}"] + stored[f"layer_{k}_scale"]
            else:
                raw = stored[f"layer_{k}"]
            assert raw == expected
            assert stored["checksums"][index] == xxhash.xxh3_64_intdigest(expected)


def test_generated_tokens_are_appended_and_supervised(tmp_path):
    about, ids = identity(), random_ids([4])
    unit = writer(tmp_path, about, ids)
    write(unit, about, ids, 0, generated=(7, 8))
    row = pq.read_table(tmp_path / attempt_dir(JOB, 0, 1) / unit.seal().file).to_pylist()[0]
    assert row["input_ids"] == [*ids[0], 7, 8]
    assert row["loss_mask"] == [1] * 6
    assert (row["num_tokens"], row["prompt_tokens"]) == (6, 4)


def test_a_row_that_is_not_finite_is_rejected_and_the_others_are_kept(tmp_path):
    about, ids = identity(), random_ids([4, 4])
    unit = writer(tmp_path, about, ids)
    broken = states(about, ids[0])
    broken[1, 2, 3] = float("nan")
    write(unit, about, ids, 0, broken)
    write(unit, about, ids, 1)
    receipt = unit.seal()
    assert receipt.rows == (1,)
    assert [(reject.row, reject.reason) for reject in receipt.rejected] == [(0, "not-finite")]


def test_rows_are_spread_over_ranks_and_each_rank_answers_for_its_own(tmp_path):
    about, ids = identity(), random_ids([2] * 5)
    ranks = [writer(tmp_path, about, ids, rank=rank, num_ranks=2) for rank in (0, 1)]
    for row in range(5):
        write(ranks[row % 2], about, ids, row)
    receipts = [unit.seal() for unit in ranks]
    assert [receipt.rows for receipt in receipts] == [(0, 2, 4), (1, 3)]
    assert [receipt.file for receipt in receipts] == ["train-00000-r0.parquet", "train-00000-r1.parquet"]


def left(work_root: Path) -> list[str]:
    return [file.name for file in (work_root / attempt_dir(JOB, 0, 1)).iterdir()]


def test_a_unit_without_any_row_written_has_no_file(tmp_path):
    unit = writer(tmp_path, identity(), random_ids([2, 2]))
    unit.void(0)
    unit.skip(1)
    receipt = unit.seal()
    assert (receipt.file, receipt.void) == (None, (0,))
    assert left(tmp_path) == [PLAN_FILE]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planned_hash": hash_ids([1, 2, 3, 4])}, "other token ids"),
        ({"num_tokens": 2}, "2 states for 4 planned"),
    ],
)
def test_what_is_not_the_plans_row_is_refused(tmp_path, change, message):
    about, ids = identity(), random_ids([4, 4])
    with pytest.raises(StatesWrongError, match=message):
        write(writer(tmp_path, about, ids), about, ids, 0, **change)


def test_a_row_that_comes_twice_is_refused(tmp_path):
    about, ids = identity(), random_ids([4, 4])
    unit = writer(tmp_path, about, ids)
    write(unit, about, ids, 0)
    with pytest.raises(StatesWrongError, match="came twice"):
        write(unit, about, ids, 0)


def test_states_that_are_no_longer_what_was_copied_are_refused_by_their_place(tmp_path):
    about, ids = identity(), random_ids([4])
    states_LTH = states(about, ids[0])
    copied_LT = token_sums(states_LTH)
    states_LTH.view(torch.int16)[1, 2, 3] ^= 1
    with pytest.raises(StatesWrongError, match=r"row 0: .* 1 of 12, the first at token 2 of layer 4$"):
        writer(tmp_path, about, ids).write(job(about, ids[0], 0), states_LTH, copied_LT)


def test_layers_that_only_rounding_makes_equal_are_two(tmp_path):
    about, ids = identity(compression="fp8"), random_ids([4])
    unit = writer(tmp_path, about, ids)
    near = states(about, ids[0])
    near[1] = near[0]
    near[:, :, 0] = 1000.0
    near[1, 2, 5] *= 1 + 2.0**-7
    write(unit, about, ids, 0, near)
    stored = pq.read_table(tmp_path / attempt_dir(JOB, 0, 1) / unit.seal().file).to_pylist()[0]
    assert stored["checksums"][0] == stored["checksums"][1] != stored["checksums"][2]
    near[1] = near[0]
    again = opened(tmp_path, about, 1)
    with pytest.raises(StatesWrongError, match="hold the same states"):
        write(again, about, ids, 0, near)


def test_a_layer_that_does_not_come_back_from_its_codes_is_named(tmp_path, monkeypatch):
    about, ids = identity(compression="fp8"), random_ids([4])
    monkeypatch.setattr("schemas.dataset.codecs.fp8.scales_of", lambda largest_T: largest_T / 1000)
    with pytest.raises(StatesWrongError, match="layer 2: token 0 does not come back"):
        write(writer(tmp_path, about, ids), about, ids, 0)


def test_discarding_leaves_no_file(tmp_path):
    about, ids = identity(), random_ids([4, 4])
    unit = writer(tmp_path, about, ids)
    write(unit, about, ids, 0)
    final = tmp_path / attempt_dir(JOB, 0, 1) / "train-00000.parquet"
    assert temporary(final).exists()
    unit.discard()
    assert left(tmp_path) == [PLAN_FILE]


def test_a_plan_that_is_not_there_or_not_the_orders_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=PLAN_FILE):
        opened(tmp_path, identity(), 1)
    write_plan(tmp_path, random_ids([4, 4]))
    with pytest.raises(StatesWrongError, match="the plan holds 2 rows, the order says 3"):
        opened(tmp_path, identity(), 3)
