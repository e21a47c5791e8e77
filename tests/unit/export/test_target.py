"""A named target is held against the dataset's by its final norm."""

from pathlib import Path

import pytest
import torch

from service.export.source import source_of
from service.export.target import has_another_norm
from service.reader import QuarryDataset
from tests.contract.export.conftest import wanted
from tests.support.finished_job import HIDDEN, a_dataset


@pytest.mark.parametrize(
    ("weight_H", "is_another"),
    [
        (torch.ones(HIDDEN, dtype=torch.bfloat16), False),
        (torch.full((HIDDEN,), 1.5), True),
        (torch.ones(HIDDEN + 1), False),
        (torch.ones(HIDDEN, dtype=torch.int8), False),
    ],
)
def test_a_final_norm_is_another_only_if_it_can_be_compared(
    tmp_path: Path, weight_H: torch.Tensor, is_another: bool
) -> None:
    a_dataset(tmp_path, num_units=1)
    source = source_of(QuarryDataset(tmp_path), wanted("speculators"))
    assert has_another_norm(source, weight_H) is is_another
