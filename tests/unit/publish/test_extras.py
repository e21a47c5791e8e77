"""Token counts and the final norm of a dataset."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset.token_counts import TOKEN_FREQ_SCHEMA
from schemas.names import token_freq_path
from service.errors import DatasetBroken, OptionRefused
from service.publish.extras import file_entry, write_final_norm, write_token_freq
from tests.support.finished_job import FINAL_NORM, JOB, OTHER_NORM, an_account, row_tokens


def test_only_supervised_tokens_are_counted_over_all_index_files(tmp_path: Path) -> None:
    account = an_account(tmp_path, num_units=3, rows=4)
    entry, counts = write_token_freq(tmp_path, JOB, [index.path for index in account.indexes])
    table = pq.read_table(tmp_path / token_freq_path(JOB))
    expected = Counter(token for unit in range(3) for row in range(4) for token in row_tokens(unit, row)[1:])
    assert table.schema.equals(TOKEN_FREQ_SCHEMA)
    assert list(zip(*(column.to_pylist() for column in table.columns), strict=True)) == sorted(
        expected.items()
    )
    assert counts == expected
    assert entry == file_entry(tmp_path, token_freq_path(JOB))


def test_counting_again_gives_the_same_bytes(tmp_path: Path) -> None:
    indexes = [index.path for index in an_account(tmp_path).indexes]
    once, _ = write_token_freq(tmp_path, JOB, indexes)
    assert write_token_freq(tmp_path, JOB, reversed(indexes))[0] == once


def test_an_index_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    index = an_account(tmp_path).indexes[0]
    (tmp_path / index.path).write_bytes(b"PAR1 this is none")
    with pytest.raises(DatasetBroken, match="train-00000"):
        write_token_freq(tmp_path, JOB, [index.path])
    assert not (tmp_path / token_freq_path(JOB)).exists()


def test_an_index_with_a_mask_of_another_length_is_named(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"input_ids": [[1, 2], [3]], "loss_mask": [[1, 1], []]}), tmp_path / "index.parquet"
    )
    with pytest.raises(DatasetBroken, match=r"index\.parquet holds 3 token ids and 2 mask flags"):
        write_token_freq(tmp_path, JOB, ["index.parquet"])


def test_the_final_norm_is_written_once(tmp_path: Path) -> None:
    first = write_final_norm(tmp_path, FINAL_NORM)
    assert write_final_norm(tmp_path, FINAL_NORM) == first
    assert (tmp_path / first.path).read_bytes() == FINAL_NORM


def test_another_models_final_norm_is_refused_and_the_first_kept(tmp_path: Path) -> None:
    entry = write_final_norm(tmp_path, FINAL_NORM)
    with pytest.raises(OptionRefused) as refused:
        write_final_norm(tmp_path, OTHER_NORM)
    assert refused.value.field == "model"
    assert (tmp_path / entry.path).read_bytes() == FINAL_NORM
