"""Reading a dataset starts no thread of Arrow's: one that is still there can abort a process that ends."""

import subprocess
import sys
from pathlib import Path

import numpy as np
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


@pytest.mark.slow
def test_a_small_file_that_names_very_many_values_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """One row whose mask is a run of zeros: 134 million values in a few kilobytes."""
    zeros = pa.LargeListArray.from_arrays([0, 2**27], pa.array(np.zeros(2**27, np.uint8)))
    pq.write_table(pa.table({"loss_mask": zeros}), tmp_path / "bomb.parquet", compression="zstd")
    assert (tmp_path / "bomb.parquet").stat().st_size < 100_000
    before = pa.total_allocated_bytes()
    for source in (tmp_path / "bomb.parquet", pa.memory_map(str(tmp_path / "bomb.parquet"))):
        with pytest.raises(pa.ArrowInvalid, match="134217728 values"):
            read_table(source)
    assert pa.total_allocated_bytes() - before < 2**24


def test_a_column_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """Found by fuzzing: pyarrow raises a UnicodeDecodeError, which no caller expected."""
    path = tmp_path / "named.parquet"
    pq.write_table(pa.table({"abcdefgh": [1]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abcd\xff\xfe\xfdh"))
    with pytest.raises(pa.ArrowInvalid, match="UTF-8"):
        read_table(path)
