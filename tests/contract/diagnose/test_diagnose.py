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


def captured(folder, target, samples):
    shop = Shop.open(folder, target, engine="tests.support.model_engine:ModelEngine")
    try:
        job = shop.run(request(target, samples, layers=list(range(LAST + 1))))
        assert job.state is JobState.COMPLETED, job.problem
        return shop.settings.dataset_dir(job.id)
    finally:
        shop.store.close()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, target):
    return captured(tmp_path_factory.mktemp("shop"), target, conversations(16))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory, target, dataset):
    out = tmp_path_factory.mktemp("drafters")
    run("tests.contract.diagnose.drafter_maker", target, dataset, out)
    return out


@pytest.fixture
def planted(drafters, tmp_path):
    """Return a copy of the right drafter with a mistake in it."""

    def plant(config=None, tensors=None, name="planted"):
        folder = tmp_path / name
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
        words = (folder, "--dataset", dataset, "--target", target, "--rows", 8)
        return run("service.cli", "diagnose", *words, *options, code=code)

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
    assert "Nothing wrong was found" in page
    assert page.rstrip().endswith("</html>")
    assert "<script" not in page


def test_an_untrained_drafter_is_called_so(drafters, diagnosed):
    (only,) = findings(diagnosed(drafters / "untrained", "--json"))
    assert "undertrained" in only["what"]


def test_one_row_has_no_other_to_exchange_states_with_and_is_refused(drafters, target, tmp_path):
    """Its own states in place of another row's would show that a right drafter uses none."""
    one = captured(tmp_path, target, conversations(1))
    words = (drafters / "right", "--dataset", one, "--target", target)
    done = run("service.cli", "diagnose", *words, code=2)
    assert "two rows with a supervised token are needed, got 1" in done.stderr


@pytest.mark.parametrize(
    ("config", "cure"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, '"eagle_aux_hidden_state_layer_ids": [2, 4, 5]'),
        ({"norm_before_residual": False}, '"norm_before_residual": true'),
    ],
)
def test_a_wrong_line_of_the_config_is_named_with_the_right_one(config, cure, planted, diagnosed):
    assert cure in [one["cure"] for one in findings(diagnosed(planted(config), "--json"))]


def test_a_head_that_is_not_the_drafters_is_named(planted, diagnosed):
    folder = planted(tensors=lambda own: own | {"lm_head.weight": own["embed_tokens.weight"].clone()})
    (only,) = findings(diagnosed(folder, "--json"))
    assert "lm_head.weight" in only["cure"]


LAYERS = "eagle_aux_hidden_state_layer_ids"
BAD = (
    (
        {},
        lambda own: own | {"layers.7.odd": torch.zeros(1)},
        'Unexpected key(s) in state_dict: "layers.7.odd"',
    ),
    (
        {},
        lambda own: {name: own[name] for name in own if name != "fc.weight"},
        'Missing key(s) in state_dict: "fc',
    ),
    ({}, lambda own: own | {"norm.weight": torch.zeros(3)}, "size mismatch for norm.weight"),
    (
        {},
        lambda own: own | {"norm.weight": torch.full((64,), torch.inf)},
        "norm.weight holds NaN or infinity",
    ),
    ({"speculators_config": {}}, None, "speculators_config"),
    ({LAYERS: ["two", 4, 5]}, None, LAYERS),
    ({LAYERS: 2}, None, LAYERS),
    ({LAYERS: [2, 4]}, None, "size mismatch for fc.weight"),
    ({LAYERS: [2, 4, 7]}, None, "names the layers [2, 4, 7], the target has 6"),
    ({"target_hidden_size": 128}, None, "of another target: its hidden size is 128, expected 64"),
)


def test_a_bad_checkpoint_is_refused_by_name(planted, target, dataset):
    folders = [planted(config, tensors, str(at)) for at, (config, tensors, _) in enumerate(BAD)]
    done = run("tests.contract.diagnose.refusals", target, dataset, *folders)
    for line, (_, _, said) in zip(done.stdout.splitlines(), BAD, strict=True):
        assert line.startswith("drafter ")
        assert said in line


def test_a_refusal_ends_the_command_with_its_field(planted, diagnosed):
    done = diagnosed(planted({LAYERS: [2, 4, 7]}), code=2)
    assert "field: drafter" in done.stderr


def test_a_checkpoint_in_its_authors_form_is_taken(drafters, target, dataset, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    ours = json.loads((drafters / "right" / "config.json").read_text())
    kept = {name: ours[name] for name in ("norm_before_residual", "draft_vocab_size", LAYERS)}
    theirs = ours["transformer_layer_config"] | kept | {"architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps(theirs))
    weights = load_file(drafters / "right" / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors")
    assert run("tests.contract.diagnose.refusals", target, dataset, folder).stdout == "not refused\n"
