from dataclasses import replace

import numpy as np
import pytest

from schemas.dataset.shard import LightRow
from service.proof.sample_name import name_fault
from tests.support.plans import sample_id


def light(prompt: int = 3) -> LightRow:
    ids, mask = np.array([5, 6, 7, 8], np.int32), np.array([0, 1, 1, 1], np.uint8)
    name = sample_id("a", ids[:prompt], mask[:prompt])
    return LightRow(name, "a", 4, prompt, 8, ids, mask, (1, 2))


@pytest.mark.parametrize("prompt", [1, 3, 4])
def test_a_row_is_what_its_name_says_whatever_was_generated_after_it(prompt):
    assert name_fault(light(prompt)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": np.array([5, 6, 9, 8], np.int32)},
        {"loss_mask": np.array([1, 1, 1, 1], np.uint8)},
        {"source_id": "b"},
        {"sample_id": "0" * 32},
        {"prompt_tokens": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_departs_from_the_name_is_told(change):
    assert "are those of sample" in str(name_fault(replace(light(), **change)))


def test_a_generated_token_is_not_in_the_name():
    assert name_fault(replace(light(), input_ids=np.array([5, 6, 7, 99], np.int32))) is None
