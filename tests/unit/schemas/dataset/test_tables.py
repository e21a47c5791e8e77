"""Reading a dataset starts no thread of Arrow's: one that is still there can abort a process that ends."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset.tables import read_plan_table, read_table

DATASET = Path(__file__).parents[3] / "frozen/datasets/answers"

COUNT = """
import os, sys
from pathlib import Path
from schemas.dataset.index import read_index
from schemas.dataset.shard import open_shard
from schemas.dataset.token_counts import read_counts
threads = lambda: len(os.listdir("/proc/self/task"))
dataset, before = Path(sys.argv[1]), threads()
for file in dataset.glob("index/*/*.parquet"):
    read_index(file)
for file in dataset.glob("token_freq/*.parquet"):
    read_counts(file.read_bytes(), file.name)
for file in dataset.glob("data/*/*.parquet"):
    with open_shard(file) as shard:
        shard.light
print(threads() - before)
"""


def test_reading_starts_no_thread():
    ran = subprocess.run([sys.executable, "-c", COUNT, DATASET], capture_output=True, text=True, check=True)
    assert ran.stdout == "0\n"


def test_a_missing_column_is_named_and_a_plan_has_its_own_columns(tmp_path):
    file = tmp_path / "file.parquet"
    pq.write_table(pa.table({"position": [0]}), file)
    with pytest.raises(pa.ArrowInvalid, match="no column sample_id"):
        read_table(file, ["sample_id"])
    with pytest.raises(pa.ArrowInvalid, match="not those of a plan"):
        read_plan_table(file)
