"""The reader bench does what it says on rows too small to time; no claim about a time."""

import pytest

from benchmarks.dataset import Shape, write_dataset
from service.proof.verify import verify_dataset
from service.reader import QuarryDataset

SMALL = Shape(num_rows=6, shortest=16, longest=40, hidden_size=256)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    write_dataset(root / "dataset", root / "scratch", SMALL)
    return root / "dataset"


def test_the_dataset_is_right_and_has_the_rows_that_the_shape_says(dataset):
    report = verify_dataset(dataset)
    assert report.ok, report.findings
    rows = QuarryDataset(dataset)
    assert rows.num_tokens == SMALL.lengths
    assert sum(rows[number].auxiliary().nbytes + rows[number].last().nbytes for number in range(6)) == (
        SMALL.state_bytes
    )
