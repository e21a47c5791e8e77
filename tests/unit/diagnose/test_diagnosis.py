"""What a diagnosis says of single rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from service.diagnose.acceptance import Drafts, RowPredictions
from service.diagnose.diagnosis import _groups, _worst


def test_a_draft_behind_the_end_of_a_row_is_not_called_right() -> None:
    """What the target would have said there is not known."""
    right_KR, known_KR = np.array([[True], [True]]), np.array([[True], [False]])
    predicted = RowPredictions(0, False, 0.5, np.array([7]), np.array([True]), right_KR, known_KR)
    drafts = Drafts(np.array([0]), np.array([0]), np.array([[1.0, 0.5]]))
    source: Any = SimpleNamespace(rows=SimpleNamespace(row=lambda _: SimpleNamespace(source_id="a")))
    (worst,) = _worst(source, drafts, [predicted])
    assert worst.accepted == {7: 1.0}


def test_drafts_are_grouped_by_the_labels_that_every_job_has() -> None:
    """An index without a label's column cannot be asked for it."""
    columns = {"lang": ["de", None]}
    labels = {"night 1": ("lang", "score"), "night 2": ("lang",)}
    manifests = {
        job: SimpleNamespace(provenance=SimpleNamespace(identity=SimpleNamespace(labels=names)))
        for job, names in labels.items()
    }
    rows = SimpleNamespace(manifests=manifests, num_tokens=[9, 9], labels=columns.__getitem__)
    identity = manifests["night 1"].provenance.identity
    source: Any = SimpleNamespace(rows=rows, identity=identity)
    groups = _groups(source, Drafts(np.array([0, 1]), np.array([0, 0]), np.ones((2, 3))))
    assert list(groups)[2:] == ["by lang"]
    assert list(groups["by lang"]) == ["None", "de"]
