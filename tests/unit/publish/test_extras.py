"""Token counts and the final norm of a dataset."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from schemas.dataset.token_counts import TOKEN_FREQ_SCHEMA
from schemas.names import token_freq_path
from service.errors import OptionRefused
from service.publish.extras import write_final_norm, write_token_freq
from tests.support.finished_job import FINAL_NORM, JOB, OTHER_NORM
from tests.support.shards import entry_of


def test_counts_are_sealed_by_token_id(tmp_path: Path) -> None:
    counts = Counter({9: 1, 2: 5, 151_000: 3})
    entry = write_token_freq(tmp_path, JOB, counts, "1")
    table = pq.read_table(tmp_path / token_freq_path(JOB))
    assert table.schema.equals(TOKEN_FREQ_SCHEMA)
    assert list(zip(*(column.to_pylist() for column in table.columns), strict=True)) == sorted(counts.items())
    assert entry == entry_of(tmp_path, token_freq_path(JOB)) == write_token_freq(tmp_path, JOB, counts, "1")


def test_the_final_norm_is_written_once(tmp_path: Path) -> None:
    first = write_final_norm(tmp_path, FINAL_NORM, "1")
    assert write_final_norm(tmp_path, FINAL_NORM, "2") == first
    assert (tmp_path / first.path).read_bytes() == FINAL_NORM


def test_another_models_final_norm_is_refused_and_the_first_kept(tmp_path: Path) -> None:
    entry = write_final_norm(tmp_path, FINAL_NORM, "1")
    with pytest.raises(OptionRefused) as refused:
        write_final_norm(tmp_path, OTHER_NORM, "1")
    assert refused.value.field == "model"
    assert (tmp_path / entry.path).read_bytes() == FINAL_NORM
