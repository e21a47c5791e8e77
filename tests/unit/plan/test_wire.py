"""Rows cross from the child unchanged, and what is no row ends its plan: the child runs what others wrote."""

from typing import Any

import numpy as np
import pytest

from service.plan.child.wire import FRAME, MAX_PART_BYTES, BadFrame, frame_lengths, pack_rows, unpack_rows
from service.plan.samples import Tokenized
from service.plan.sources import RejectReason, RowReject
from service.plan.units import RowOutcome


def test_rows_are_the_same_on_the_other_side() -> None:
    rows = [
        RowOutcome(7, "a", Tokenized(np.array([1, 2**31 - 1], np.int32), np.array([0, 1], np.uint8))),
        RowOutcome(8, "\ud800", RowReject(RejectReason.EMPTY, "no tokens")),
        RowOutcome(9, "c", Tokenized(np.array([5], np.int32), np.array([1], np.uint8))),
    ]
    entries, body = pack_rows(rows)
    for sent, received in zip(rows, unpack_rows(entries, body, 7), strict=True):
        assert (sent.position, sent.source_id) == (received.position, received.source_id)
        if isinstance(sent.result, RowReject):
            assert sent.result == received.result
        else:
            assert isinstance(received.result, Tokenized)
            assert received.result.ids.tolist() == sent.result.ids.tolist()
            assert received.result.mask.tolist() == sent.result.mask.tolist()


@pytest.mark.parametrize(
    "entries",
    [
        "rows",
        [[1, "a", 0]],
        [[0, 5, 0]],
        [[0, "a", 3]],
        [[0, "a", -1]],
        [[0, "a", "no-such-reason", ""]],
        [{}],
        [[]],
    ],
)
def test_what_is_no_row_is_refused(entries: Any) -> None:
    with pytest.raises(BadFrame):
        list(unpack_rows(entries, b"\0" * 10, 0))


def test_a_frame_is_bounded() -> None:
    with pytest.raises(BadFrame):
        frame_lengths(FRAME.pack(b"B", 1, MAX_PART_BYTES + 1))
