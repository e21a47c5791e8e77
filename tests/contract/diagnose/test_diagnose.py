"""`quarry diagnose` with speculators' own model classes: right drafters are left alone, wrong ones named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.trainers import TRAINERS
from schemas.job import JobState
from tests.support.jobs import Shop, conversations, request
from tests.support.tiny_model import random_target

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
LAST = 6


def run(*arguments, code=0):
    assert TRAINERS.is_dir(), f"{TRAINERS} is missing: run 'make .cache/trainers/installed'"
    environment = os.environ | {
        "PYTHONPATH": f"{TRAINERS}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "real"
    return random_target(folder, layers=LAST, hidden=64, dtype="float32", max_position=512)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, target):
    shop = Shop.open(tmp_path_factory.mktemp("shop"), target, engine="tests.support.model_engine:ModelEngine")
    try:
        job = shop.run(request(target, conversations(16), layers=list(range(LAST + 1))))
        assert job.state is JobState.COMPLETED, job.problem
        return shop.settings.dataset_dir(job.id)
    finally:
        shop.store.close()


@pytest.fixture(scope="module")
def drafters(tmp_path_factory, target, dataset):
    out = tmp_path_factory.mktemp("drafters")
    run("tests.contract.diagnose.drafter_maker", target, dataset, out)
    return out


@pytest.fixture
def planted(drafters, tmp_path):
    """Return a copy of the right drafter with a mistake in it."""

    def plant(config=None, tensors=None):
        folder = tmp_path / "planted"
        shutil.copytree(drafters / "right", folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | (config or {})))
        weights = load_file(folder / "model.safetensors")
        save_file((tensors or (lambda same: same))(weights), folder / "model.safetensors")
        return folder

    return plant


@pytest.fixture
def diagnosed(target, dataset):
    def diagnose(folder, *options, code=0):
        return run(
            "service.cli", "diagnose", folder, "--dataset", dataset, "--target", target, *options, code=code
        )

    return diagnose


def findings(done):
    return json.loads(done.stdout)["findings"]


def test_a_right_drafter_is_left_alone_and_its_page_is_whole(drafters, diagnosed, tmp_path):
    done = diagnosed(drafters / "right", "--json", "--report", tmp_path / "page.html")
    found = json.loads(done.stdout)
    assert found["findings"] == []
    assert found["length"]["mean"] > 1.3
    assert not found["played"]
    page = (tmp_path / "page.html").read_text()
    assert "It is fed what it was trained on" in page
    assert page.rstrip().endswith("</html>")
    assert "<script" not in page


def test_an_untrained_drafter_is_called_so(drafters, diagnosed):
    (only,) = findings(diagnosed(drafters / "untrained", "--json"))
    assert "undertrained" in only["what"]


@pytest.mark.parametrize(
    ("config", "cure"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, '"eagle_aux_hidden_state_layer_ids": [2, 4, 5]'),
        ({"norm_before_residual": False}, '"norm_before_residual": true'),
    ],
)
def test_a_wrong_line_of_the_config_is_named_with_the_right_one(config, cure, planted, diagnosed):
    assert cure in [one["cure"] for one in findings(diagnosed(planted(config), "--json"))]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (lambda own: own | {"layers.7.odd": torch.zeros(1)}, "layers.7.odd"),
        (lambda own: {name: own[name] for name in own if name != "fc.weight"}, "fc.weight"),
        (lambda own: own | {"norm.weight": torch.zeros(3)}, "norm.weight is [3], expected [64]"),
        (
            lambda own: own | {"norm.weight": torch.full((64,), torch.inf)},
            "norm.weight holds NaN or infinity",
        ),
    ],
)
def test_a_bad_tensor_is_refused_by_name(tensors, said, planted, diagnosed):
    done = diagnosed(planted(tensors=tensors), code=2)
    assert said in done.stderr
    assert "field: drafter" in done.stderr


def test_a_dataset_without_the_declared_layers_is_asked_for_them(planted, diagnosed):
    folder = planted({"eagle_aux_hidden_state_layer_ids": [2, 4, 7]})
    assert "names the layers [7]" in diagnosed(folder, code=2).stderr
