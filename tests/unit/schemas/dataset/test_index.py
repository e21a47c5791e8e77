from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from schemas.dataset.columns import INDEX_SCHEMA
from schemas.dataset.errors import DatasetError
from schemas.dataset.index import read_index, write_index
from schemas.dataset.seal import sha256_of
from tests.support.plans import identity, provenance
from tests.support.shards import light_rows, plan_of, write_shard
from tests.unit.schemas.dataset.test_shard import LAYERS, random_rows

PATH = "index/j-0123456789abcdef/train-00000.parquet"


@pytest.fixture
def unit(tmp_path):
    """Five planned rows, four written over two ranks in another order than planned."""
    rows = random_rows("bfloat16", lengths=(1, 5, 9, 3, 7))
    rows = [replace(row, loss_mask=[n % 2 for n in range(len(row.input_ids))]) for row in rows]
    plan = plan_of(rows)
    told = provenance(identity(layer_ids=LAYERS))
    write_shard(tmp_path / "r0.parquet", [rows[4], rows[0]], told)
    write_shard(tmp_path / "r1.parquet", [rows[3], rows[1]], told)
    shards = {f"data/{name}": light_rows(tmp_path / name) for name in ("r0.parquet", "r1.parquet")}
    return rows, plan, shards


def test_every_written_row_stands_in_plan_order_with_its_place(tmp_path, unit):
    rows, plan, shards = unit
    witnesses = {3: ((17, -0.25), (4, -2.5)), 2: ((1, -1.0),)}
    entry, counts = write_index(tmp_path / "index.parquet", PATH, shards, plan, witnesses)
    table = pq.read_table(tmp_path / "index.parquet")
    assert table.schema.equals(INDEX_SCHEMA)
    assert table["sample_id"].to_pylist() == ["s0", "s1", "s3", "s4"]
    assert table["shard"].to_pylist() == [
        "data/r0.parquet",
        "data/r1.parquet",
        "data/r1.parquet",
        "data/r0.parquet",
    ]
    assert table["row"].to_pylist() == [1, 1, 0, 0]
    assert table["input_ids"].to_pylist() == [rows[n].input_ids for n in (0, 1, 3, 4)]
    assert table["loss_mask"].to_pylist() == [rows[n].loss_mask for n in (0, 1, 3, 4)]
    assert table["supervised_tokens"].to_pylist() == [0, 2, 1, 3]
    assert table["top_tokens"].to_pylist() == [None, None, [17, 4], None]
    assert table["top_logprobs"].to_pylist() == [None, None, [-0.25, -2.5], None]
    assert counts == Counter(token for n in (0, 1, 3, 4) for token in rows[n].input_ids[1::2])
    assert (entry.path, (entry.sha256, entry.bytes)) == (PATH, sha256_of(tmp_path / "index.parquet"))


def test_writing_it_again_gives_the_same_bytes(tmp_path, unit):
    _, plan, shards = unit
    first, _ = write_index(tmp_path / "index.parquet", PATH, shards, plan, {})
    second, _ = write_index(tmp_path / "again.parquet", PATH, dict(reversed(shards.items())), plan, {})
    assert first == second


def test_a_file_that_is_no_index_is_named(tmp_path, unit):
    _, plan, _ = unit
    pq.write_table(plan, tmp_path / "plan.parquet")
    with pytest.raises(DatasetError, match="columns are not those of an index"):
        read_index(tmp_path / "plan.parquet")
    plan = tmp_path / "plan.parquet"
    plan.write_bytes(plan.read_bytes()[:-9])
    with pytest.raises(DatasetError, match="cannot be read"):
        read_index(plan)
