"""The wrong datasets hold exactly their mistake: each state is compared with the fake engine's formula."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.loop.datasets import EXPORT, MISTAKES, STATES, spoiled
from benchmarks.loop.recipe import AUX, LAST, LAYERS
from benchmarks.loop.stage import Cache
from service.export.run import export
from tests.contract.export.conftest import HIDDEN, Truth, truths_of, wanted
from tests.contract.reader.conftest import finished
from tests.support.tiny_model import random_target


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    target = random_target(
        tmp_path_factory.mktemp("models") / "target", layers=LAST, hidden=HIDDEN, max_position=512
    )
    return finished(tmp_path_factory.mktemp("dataset"), target, layers=LAYERS)


@pytest.fixture(scope="module")
def right(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("stage") / EXPORT
    export(str(dataset), out, wanted("speculators", layers=AUX))
    return out


def states_TLH(truth: Truth, below: int = 0) -> torch.Tensor:
    return torch.stack([truth.layer(k - below) for k in (*AUX, LAST)], dim=1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_spoiled_dataset_differs_in_nothing_but_its_states(mistake, dataset, right, tmp_path):
    data = spoiled(Cache(tmp_path), mistake, dataset, right)
    truths = list(truths_of(dataset))
    assert len(list((data / STATES).iterdir())) == len(truths) > 1
    for number, truth in enumerate(truths):
        before, after = (load_file(folder / STATES / f"hs_{number}.safetensors") for folder in (right, data))
        assert torch.equal(before["hidden_states"], states_TLH(truth))
        assert torch.equal(after["token_ids"], truth.ids)
        assert after["hidden_states"].shape == before["hidden_states"].shape
        assert not torch.equal(after["hidden_states"], before["hidden_states"])
    shutil.rmtree(data / STATES)
    names = {path.name for path in right.iterdir()} - {STATES}
    assert {path.name for path in data.iterdir()} == names
    assert all((data / name).read_bytes() == (right / name).read_bytes() for name in names)


def test_each_mistake_is_the_one_it_is_named_for(dataset, right, tmp_path):
    truths = list(truths_of(dataset))
    found = {
        mistake: load_file(spoiled(Cache(tmp_path), mistake, dataset, right) / STATES / "hs_3.safetensors")
        for mistake in MISTAKES
    }
    assert torch.equal(found["layer_below"]["hidden_states"], states_TLH(truths[3], below=1))
    normed, plain = found["extra_norm"]["hidden_states"], states_TLH(truths[3])
    assert torch.equal(normed[:, :-1], plain[:, :-1])
    assert torch.allclose(normed[:, -1].float(), truths[3].post().float(), rtol=2**-7, atol=1e-6)
    other, next_row = found["other_row"]["hidden_states"], states_TLH(truths[4])
    shared = min(len(other), len(next_row))
    assert torch.equal(other[:shared], next_row[:shared])
