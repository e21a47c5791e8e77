"""The storage bench tells forms apart by what they lose and what they take."""

import pytest
import torch

from benchmarks.storage import FIGURES, costs_table, distance, lost_table, opinion, timed
from benchmarks.storage_forms import PEER, forms
from tests.support.plans import random_ids

LAYERS = (1, 4)


def rows(hidden_size: int = 64) -> tuple[list[list[int]], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    ids = random_ids([5, 40])
    # The second layer is a thousand times the first.
    sizes = torch.tensor([1.0, 1000.0])[:, None, None]
    return ids, [(sizes * torch.randn((2, len(one), hidden_size), generator=draw)).bfloat16() for one in ids]


@pytest.mark.slow  # The peer's form is in the trainers' folder.
def test_every_form_gives_back_what_it_took_within_its_precision(tmp_path):
    ids, states = rows()
    found = {}
    for name, form in forms(LAYERS).items():
        (tmp_path / name).mkdir()
        form.write(tmp_path / name, ids, states)
        found[name] = distance(
            states, [form.read(tmp_path / name, row, len(one)) for row, one in enumerate(ids)]
        )
    assert found["none"]["error_largest"] == found["planes"]["error_largest"] == 0.0
    assert 0.01 < found["fp8"]["error_largest"] < 1 / 17
    assert found[PEER]["error_largest"] > found["fp8"]["error_largest"]
    assert "fp8" in lost_table(found)


@pytest.mark.slow  # The peer's form is in the trainers' folder.
def test_a_form_is_timed_and_its_files_are_gone(tmp_path):
    ids, states = rows()
    figures = {name: timed(form, tmp_path / name, ids, states) for name, form in forms(LAYERS).items()}
    assert all(set(one) == set(FIGURES) and one["size"] > 0 for one in figures.values())
    assert figures["fp8"]["size"] < figures["none"]["size"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    kept = {name: {key: {"median": value} for key, value in one.items()} for name, one in figures.items()}
    assert len(costs_table(kept).splitlines()) == 2 + len(figures)


def test_the_same_opinion_is_no_distance_and_another_is():
    logprobs_NV = torch.log_softmax(torch.randn((9, 30), generator=torch.Generator().manual_seed(2)), dim=1)
    same = opinion(logprobs_NV, logprobs_NV)
    assert (same["kl_largest"], same["argmax_agree"]) == (pytest.approx(0.0), 1.0)
    other = opinion(logprobs_NV, logprobs_NV.roll(1, dims=1))
    assert other["kl_mean"] > 0.1 and other["argmax_agree"] == 0.0
