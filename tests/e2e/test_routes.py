"""Which class of the engine computes the states, on the real engine: whichever it is, they are the model's.

The truth is a transformers forward pass in a process of its own, in float32.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.dataset.manifest import Manifest
from schemas.job import JobState
from schemas.names import manifest_path
from tests.architectures.recipes import RECIPES
from tests.architectures.target import make_target
from tests.support.engine_bench import relative_T
from tests.support.jobs import request
from tests.support.plans import random_ids
from tests.support.real_engine import StoredRow, by_id, reference, stored_rows, vllm_shop
from tests.support.step3p5 import NUM_LAYERS, ON_CPU, step3p5_target

ROOT = Path(__file__).parents[2]
LAYERS = (0, 1, 4, 8)
TOLERANCE = 1e-4
"""Relative, of a token's state in float32: rounding adds up to some 1e-5 here; mistakes are 1e-1."""
LENGTHS = [1, 17, 127, 129, 300]
"""Around a block of the cache, beyond the sliding windows, and more than one chunk."""


def samples() -> list[list[int]]:
    return random_ids(LENGTHS, vocab_size=512, seed=4)


def route(folder: Path, job_id: str) -> tuple[object, object]:
    """Return what the manifest says of the class that ran."""
    manifest = Manifest.model_validate_json((folder / manifest_path(job_id)).read_bytes())
    options = manifest.provenance.engine.options
    return options["route"], options["model_class"]


def assert_the_models(rows: dict[str, StoredRow], target: Path, about: str) -> None:
    """Every state of every layer is the model's."""
    assert len(rows) == len(LENGTHS)
    truth = reference(target, [row.ids for row in rows.values()])
    worst: dict[int, float] = {}
    for row, layers in zip(rows.values(), truth, strict=True):
        for k, states in row.layers.items():
            worst[k] = max(worst.get(k, 0.0), float(relative_T(states, layers[k]).max()))
    print(
        f"{about}: worst relative error of a token by layer",
        {k: f"{error:.1e}" for k, error in worst.items()},
    )
    assert {k: error for k, error in worst.items() if not error <= TOLERANCE} == {}


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize(
    ("architecture", "kind", "model_class"),
    [
        ("MixtralForCausalLM", "plugin", "MixtralForCausalLM"),
        ("Gemma3ForCausalLM", "plugin", "Gemma3ForCausalLM"),
        ("Cohere2ForCausalLM", "transformers", "TransformersForCausalLM"),
    ],
)
def test_a_class_without_states_is_helped_out_of_it(tmp_path, architecture, kind, model_class):
    target = make_target(tmp_path / "models" / "tiny", RECIPES[architecture])
    shop = vllm_shop(tmp_path, target)
    job = shop.run(request(target, by_id(samples()), layers=LAYERS[:-1], max_tokens=400))
    assert job.state is JobState.COMPLETED, job.problem
    folder = shop.settings.dataset_dir(job.id)
    assert route(folder, job.id) == (kind, model_class)
    assert_the_models(
        stored_rows(folder, job.id, LAYERS), target, f"{architecture} by {model_class} ({kind})"
    )


@pytest.mark.engine
def test_step_3_5_is_extracted_and_its_canary_passes(tmp_path):
    target = step3p5_target(tmp_path / "models" / "step3p5")
    shop = vllm_shop(tmp_path, target, engine_options=ON_CPU)
    every = tuple(range(NUM_LAYERS + 1))
    job = shop.run(request(target, by_id(samples()), layers=every[:-1], max_tokens=400, canary="run"))
    assert job.state is JobState.COMPLETED, job.problem
    folder = shop.settings.dataset_dir(job.id)
    assert route(folder, job.id) == ("plugin", "Step3p5ForCausalLM")
    assert_the_models(stored_rows(folder, job.id, every), target, "Step-3.5")


def extract_without_plugin(
    folder: Path, target: Path, layers: tuple[int, ...]
) -> subprocess.CompletedProcess[str]:
    """Run a job into `folder`/out by the command line, in processes where vLLM may load no plug-in."""
    body = request(target, by_id(samples()), layers=layers, max_tokens=400).model_dump(mode="json")
    (folder / "job.json").write_text(json.dumps(body))
    options = {"enforce_eager": True, "max_num_batched_tokens": 256}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "service.cli",
            "extract",
            str(folder / "job.json"),
            "--out",
            str(folder / "out"),
        ],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "VLLM_PLUGINS": "",
            "QUARRY_ENGINE_OPTIONS": json.dumps(options),
            "QUARRY_POOL_BYTES": str(2**20),
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize(
    ("architecture", "model_class"),
    [
        ("MixtralForCausalLM", "TransformersMoEForCausalLM"),
        ("Gemma3ForCausalLM", "TransformersForCausalLM"),
    ],
)
def test_without_our_plugin_the_engines_transformers_backend_computes_them(
    tmp_path, architecture, model_class
):
    target = make_target(tmp_path / "models" / "tiny", RECIPES[architecture])
    done = extract_without_plugin(tmp_path, target, LAYERS[1:-1])
    assert done.returncode == 0, done.stderr
    (manifest,) = (tmp_path / "out" / "manifests").glob("*.json")
    job_id = manifest.stem
    assert route(tmp_path / "out", job_id) == ("transformers", model_class)
    rows = stored_rows(tmp_path / "out", job_id, LAYERS[1:])
    assert_the_models(rows, target, f"{architecture} by {model_class}")


@pytest.mark.engine
def test_a_model_whose_only_class_is_ours_is_refused_before_the_engine_starts_and_waits_for_it(tmp_path):
    target = step3p5_target(tmp_path / "models" / "step3p5")
    done = extract_without_plugin(tmp_path, target, (1, 2))
    assert done.returncode == os.EX_TEMPFAIL
    assert "Step3p5ForCausalLM" in done.stderr
    assert "VLLM_PLUGINS" in done.stderr
