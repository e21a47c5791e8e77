"""What a diagnosis says of single rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from service.diagnose.acceptance import Drafts, RowPredictions
from service.diagnose.diagnosis import _worst


def test_a_draft_behind_the_end_of_a_row_is_not_called_right() -> None:
    """What the target would have said there is not known."""
    right_KR, known_KR = np.array([[True], [True]]), np.array([[True], [False]])
    predicted = RowPredictions(0, False, 0.5, np.array([7]), np.array([True]), right_KR, known_KR)
    drafts = Drafts(np.array([0]), np.array([0]), np.array([[1.0, 0.5]]))
    source: Any = SimpleNamespace(rows=SimpleNamespace(row=lambda _: SimpleNamespace(source_id="a")))
    (worst,) = _worst(source, drafts, [predicted])
    assert worst.accepted == {7: 1.0}
