"""The draft vocabulary: which tokens are kept, and what the two maps say of them."""

import pytest
import torch
from hypothesis import given, strategies as st

from service.errors import OptionRefused
from service.export.vocabulary import vocabulary_map

COUNTS = st.dictionaries(st.integers(0, 59), st.integers(1, 9), max_size=60)


def kept(counts: dict[int, int], draft_size: int, target_size: int) -> list[int]:
    d2t_D = vocabulary_map(counts, draft_size, target_size)["d2t"]
    return (d2t_D + torch.arange(draft_size)).tolist()


@pytest.mark.parametrize(
    ("counts", "target_ids"),
    [
        pytest.param({9: 5, 2: 1, 7: 3, 4: 3, 5: 3}, [4, 5, 9], id="of equals the lower id"),
        pytest.param({9: 5, 1: 1}, [0, 1, 2, 3, 9], id="filled with the lowest ids"),
        pytest.param({}, [0, 1, 2], id="an empty dataset"),
    ],
)
def test_the_most_frequent_tokens_are_kept(counts, target_ids):
    assert kept(counts, len(target_ids), 10) == target_ids


@given(COUNTS, st.integers(1, 60))
def test_both_maps_name_the_same_tokens(counts, draft_size):
    vocabulary = vocabulary_map(counts, draft_size, 60)
    d2t_D, t2d_V = vocabulary["d2t"], vocabulary["t2d"]
    ids_D = d2t_D + torch.arange(draft_size)
    assert (d2t_D.dtype, t2d_V.dtype) == (torch.int64, torch.bool)
    assert torch.equal(t2d_V.nonzero().flatten(), ids_D)
    left_out = [count for token_id, count in counts.items() if not t2d_V[token_id]]
    kept_counts = [counts.get(token_id, 0) for token_id in ids_D.tolist()]
    assert not left_out or max(left_out) <= min(kept_counts)


@given(COUNTS)
def test_a_draft_vocabulary_as_large_as_the_targets_keeps_every_token(counts):
    vocabulary = vocabulary_map(counts, 60, 60)
    assert not vocabulary["d2t"].any()
    assert vocabulary["t2d"].all()


@pytest.mark.parametrize("size", [0, 11])
def test_a_size_that_does_not_fit_is_refused(size):
    with pytest.raises(OptionRefused, match="does not fit a target vocabulary of 10") as refused:
        vocabulary_map({}, size, 10)
    assert (refused.value.field, refused.value.cure) == ("draft_vocab", "name 1 to 10")


def test_a_token_beyond_the_targets_vocabulary_is_refused():
    with pytest.raises(OptionRefused, match="holds token 10, the target's vocabulary has 10") as refused:
        vocabulary_map({10: 1}, 5, 10)
    assert refused.value.field == "target"
