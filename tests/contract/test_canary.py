"""The canary within a job: a model that rounding takes far gets a second look, and a wrong layer does not."""

import errno
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.dataset.manifest import Manifest
from schemas.dataset.shard import Shard
from schemas.job import JobState
from schemas.names import manifest_path
from schemas.request import Dtype
from service.capture import canary, session
from service.proof.reference import Reference, reference_states
from tests.support import planted_connector
from tests.support.jobs import Shop, request
from tests.support.plans import random_ids
from tests.support.tiny_model import random_target

pytestmark = pytest.mark.slow

LAYERS = (1, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return random_target(folder, arch="qwen3", layers=4, hidden=64, dtype="bfloat16", max_position=256)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Dtype]:
    """Make the reference chaotic in 16 bits; return the dtypes that it is asked for."""
    dtypes: list[Dtype] = []

    async def states(folder: Path, prompts: Any, dtype: Dtype, **more: Any) -> Reference:
        dtypes.append(dtype)
        said = await reference_states(folder, prompts, dtype, **more)
        if dtype == "float32":
            return said
        draw = torch.Generator().manual_seed(1)
        far = tuple(
            {k: s + 0.3 * s.std() * torch.randn(s.shape, generator=draw) for k, s in prompt.items()}
            for prompt in said.states
        )
        return replace(said, states=far)

    monkeypatch.setattr(canary, "reference_states", states)
    return dtypes


def run(folder: Path, target: Path, engine: str, unit_attempts: int = 1) -> tuple[Shop, Any]:
    shop = Shop.open(folder, target, engine=engine, unit_attempts=unit_attempts)
    samples = [{"id": str(n), "token_ids": ids} for n, ids in enumerate(random_ids([9, 40], vocab_size=1500))]
    return shop, shop.run(request(target, samples, layers=LAYERS, canary="run"))


def test_a_capture_within_the_models_own_noise_is_taken_and_the_manifest_says_so(tmp_path, target, asked):
    shop, job = run(tmp_path, target, "tests.support.model_engine:ModelEngine")
    assert job.state is JobState.COMPLETED, job.problem
    assert asked == ["bfloat16", "float32"]
    told = Manifest.model_validate_json(
        (shop.settings.dataset_dir(job.id) / manifest_path(job.id)).read_bytes()
    ).checks.canary_report
    assert told is not None
    for layer in told.layers:
        assert layer.median_rel_error < 0.02 < 0.2 < layer.own_median_rel_error


def test_the_canary_is_run_once_a_version_of_quarry(tmp_path, target, asked, monkeypatch):
    shop, job = run(tmp_path, target, "tests.support.model_engine:ModelEngine")
    assert shop.run(job.request, "the same version").state is JobState.COMPLETED
    assert len(asked) == 2
    monkeypatch.setattr(session, "version", lambda _: "0.2.0")
    assert shop.run(job.request, "another version").state is JobState.COMPLETED
    assert len(asked) == 4


def test_a_wrong_layer_is_refused_after_the_second_look_too(tmp_path, target, asked, monkeypatch):
    monkeypatch.setenv(planted_connector.ORDER, str(tmp_path / "nothing more"))
    _, job = run(tmp_path, target, "tests.drill.harness:LayerBeforeEngine")
    assert asked == ["bfloat16", "float32"]
    assert job.problem is not None
    assert "canary: layer 1" in job.problem.detail


def test_a_canary_that_cannot_be_read_back_is_captured_again(tmp_path, target, monkeypatch):
    """1. The disk fails once while the canary's file is read. 2. What is left over is in nobody's way."""
    read, broken = canary.open_shard, iter([True])

    def opened(path: Path) -> AbstractContextManager[Shard]:
        if next(broken, False):
            (path.parent / "a folder").mkdir()
            raise OSError(errno.EIO, "planted")
        return read(path)

    monkeypatch.setattr(canary, "open_shard", opened)
    shop, job = run(tmp_path, target, "tests.support.model_engine:ModelEngine", unit_attempts=2)
    assert job.state is JobState.COMPLETED, job.problem
    assert {row.attempts for row in shop.store.units(job.id)} == {2}
