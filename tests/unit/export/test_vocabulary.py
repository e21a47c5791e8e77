"""The draft vocabulary: which tokens are kept, and what the two maps say of them."""

import pytest
import torch
from hypothesis import given, strategies as st

from service.errors import OptionRefused
from service.export.vocabulary import vocabulary_map

COUNTS = st.dictionaries(st.integers(0, 59), st.integers(1, 9), max_size=60)


def kept(counts: dict[int, int], draft_size: int, target_size: int) -> list[int]:
    d2t_D, _ = vocabulary_map(counts, draft_size, target_size)
    return (d2t_D + torch.arange(draft_size)).tolist()


def test_the_most_frequent_tokens_are_kept_and_of_equals_the_lower_id():
    assert kept({9: 5, 2: 1, 7: 3, 4: 3, 5: 3}, 3, 10) == [4, 5, 9]


def test_a_short_list_is_filled_with_the_lowest_ids():
    assert kept({9: 5, 1: 1}, 5, 10) == [0, 1, 2, 3, 9]


def test_an_empty_dataset_keeps_the_lowest_ids():
    assert kept({}, 3, 10) == [0, 1, 2]


@given(COUNTS, st.integers(1, 60))
def test_both_maps_name_the_same_tokens(counts, draft_size):
    d2t_D, t2d_V = vocabulary_map(counts, draft_size, 60)
    ids_D = d2t_D + torch.arange(draft_size)
    assert (d2t_D.dtype, t2d_V.dtype) == (torch.int64, torch.bool)
    assert torch.equal(t2d_V.nonzero().flatten(), ids_D)
    left_out = [count for token_id, count in counts.items() if not t2d_V[token_id]]
    kept_counts = [counts.get(token_id, 0) for token_id in ids_D.tolist()]
    assert not left_out or max(left_out) <= min(kept_counts)


@given(COUNTS)
def test_a_draft_vocabulary_as_large_as_the_targets_keeps_every_token(counts):
    d2t_D, t2d_V = vocabulary_map(counts, 60, 60)
    assert not d2t_D.any()
    assert t2d_V.all()


@pytest.mark.parametrize("size", [0, 11])
def test_a_size_that_does_not_fit_is_refused(size):
    with pytest.raises(OptionRefused, match="does not fit a target vocabulary of 10") as refused:
        vocabulary_map({}, size, 10)
    assert (refused.value.field, refused.value.cure) == ("draft_vocab", "name 1 to 10")


def test_a_token_beyond_the_targets_vocabulary_is_refused():
    with pytest.raises(OptionRefused, match="holds token 10, the target's vocabulary has 10") as refused:
        vocabulary_map({10: 1}, 5, 10)
    assert refused.value.field == "target"
