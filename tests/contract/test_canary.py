"""The canary within a job: what it takes and refuses, when its reference runs, and within which memory."""

import asyncio
import errno
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from schemas.dataset.manifest import Manifest
from schemas.dataset.shard import Shard
from schemas.job import JobState
from schemas.names import manifest_path
from schemas.request import Dtype
from service.capture import canary, session
from service.capture.engine import Answer, EngineSpec, Prompt
from service.capture.link import EngineLink
from service.errors import EngineDied, EngineRefused
from service.proof.canary import judge as right_judge
from service.proof.reference import Reference, reference_states
from service.settings import Settings
from service.store import jobs, units
from tests.support import planted_connector
from tests.support.jobs import Shop, request
from tests.support.model_engine import ModelEngine
from tests.support.plans import random_ids
from tests.support.roles import Capture, capture_until
from tests.support.tiny_model import random_target
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
EVENTS: list[str] = []
"""What the job of the running test has done: `reference`, `ended`, `engine`."""


class PatientEngine(ModelEngine):
    """Is up only when the reference runs."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        await until(lambda: "reference" in EVENTS)
        await super().start(spec, settings, link)
        EVENTS.append("engine")


class CacheNotingEngine(ModelEngine):
    """Notes how long the canary's prompts are, and whether they may be taken from the prefix cache."""

    async def run(self, prompt: Prompt) -> Answer:
        if prompt.request_id.startswith("canary-"):
            EVENTS.append(f"{len(prompt.token_ids)} {'cached' if prompt.reads_cache else 'computed'}")
        return await super().run(prompt)


class BrokenEngine(ModelEngine):
    """Does not start, once the reference runs."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        await until(lambda: "reference" in EVENTS)
        raise EngineRefused("it never would", field="model")


class OverwrittenEngine(ModelEngine):
    """The folder that it was started from holds other weights from its first request on."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        await super().start(spec, settings, link)
        EVENTS.append("engine")

    async def run(self, prompt: Prompt) -> Answer:
        with suppress(FileNotFoundError):
            (self._spec.weights / "later").rename(self._spec.weights / "model.safetensors")
        return await super().run(prompt)


@dataclass(slots=True)
class StandIn:
    """Stands before the reference; notes what it was asked for, and makes it noisy in 16 bits if told to."""

    is_noisy: bool = False
    dtypes: list[Dtype] = field(default_factory=list)
    bounds: list[int | None] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    killed: int = 0
    """How many runs the kernel kills."""

    async def states(
        self, folder: Path, prompts: Any, dtype: Dtype, *, max_bytes: int | None, **more: Any
    ) -> Reference:
        EVENTS.append("reference")
        self.dtypes.append(dtype)
        self.bounds.append(max_bytes)
        self.longest.append(max(map(len, prompts)))
        if len(self.bounds) <= self.killed:
            raise EngineDied("the kernel ended the canary's reference", field="canary")
        try:
            right = await reference_states(folder, prompts, dtype, max_bytes=max_bytes, **more)
        finally:
            EVENTS.append("ended")
        if dtype == "float32" or not self.is_noisy:
            return right
        draw = torch.Generator().manual_seed(1)
        noisy = tuple(
            {k: s + 0.3 * s.std() * torch.randn(s.shape, generator=draw) for k, s in prompt.items()}
            for prompt in right.states
        )
        return replace(right, states=noisy)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return random_target(folder, layers=4, hidden=64, max_position=256)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    EVENTS.clear()
    monkeypatch.setattr(canary, "reference_states", stand_in.states)
    return stand_in


@pytest.fixture
def noisy(reference: StandIn) -> StandIn:
    reference.is_noisy = True
    return reference


def a_request(target: Path, **more: Any) -> Any:
    samples = [{"id": str(n), "token_ids": ids} for n, ids in enumerate(random_ids([9, 40], vocab_size=1500))]
    return request(target, samples, layers=(1, 2), canary="run", **more)


def run(
    folder: Path, target: Path, engine: type | str = ModelEngine, max_tokens: int = 4096, **settings: Any
) -> tuple[Shop, Any]:
    name = engine if isinstance(engine, str) else f"{engine.__module__}:{engine.__name__}"
    shop = Shop.open(folder, target, engine=name, **({"unit_attempts": 1} | settings))
    return shop, shop.run(a_request(target, max_tokens=max_tokens))


def test_a_capture_within_the_models_own_noise_is_taken_once_a_version_of_quarry(
    tmp_path, target, noisy, monkeypatch
):
    shop, job = run(tmp_path, target)
    assert job.state is JobState.COMPLETED, job.problem
    manifest = (shop.settings.dataset_dir(job.id) / manifest_path(job.id)).read_bytes()
    checks = Manifest.model_validate_json(manifest).checks
    assert checks.canary_report is not None
    for layer in checks.canary_report.layers:
        assert layer.median_rel_error < 0.02 < 0.2 < layer.own_median_rel_error
    assert checks.second_runs > 0
    assert shop.run(shop.store.read(jobs.request, job.id), "the same version").state is JobState.COMPLETED
    assert noisy.dtypes == ["bfloat16", "float32"]
    monkeypatch.setattr(session, "version", lambda _: "9.9.9")
    assert shop.run(shop.store.read(jobs.request, job.id), "another version").state is JobState.COMPLETED
    assert noisy.dtypes == ["bfloat16", "float32"] * 2


def test_a_wrong_layer_is_refused_by_the_float32_reference_too(tmp_path, target, noisy, monkeypatch):
    monkeypatch.setenv(planted_connector.ORDER, str(tmp_path / "nothing more"))
    _, job = run(tmp_path, target, "tests.drill.harness:LayerBeforeEngine")
    assert noisy.dtypes == ["bfloat16", "float32"] * 2, "the second engine is held against it, too"
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
    shop, job = run(tmp_path, target, unit_attempts=2)
    assert job.state is JobState.COMPLETED, job.problem
    assert {row.attempts for row in shop.store.read(units.of_job, job.id)} == {2}


def test_the_reference_runs_once_while_the_engine_starts(tmp_path, target, reference):
    shop, job = run(tmp_path, target, PatientEngine)
    assert job.state is JobState.COMPLETED, job.problem
    assert len(reference.bounds) == 1
    EVENTS[:] = ["reference"]
    assert shop.run(a_request(target), "again").state is JobState.COMPLETED
    assert EVENTS == ["reference", "engine"], "states that passed before are not computed ahead"


def test_the_canary_of_short_rows_does_not_count_for_longer_ones(tmp_path, target, reference, monkeypatch):
    kept: list[int] = []

    def judge(captured: Any, *more: Any) -> Any:
        kept.extend(one.untyped_storage().nbytes() for prompt in captured for one in prompt.values())
        return right_judge(captured, *more)

    monkeypatch.setattr(canary, "judge", judge)
    shop, job = run(tmp_path, target, max_tokens=40)
    assert job.state is JobState.COMPLETED, job.problem
    for max_tokens in (300, 4096, 50):
        again = shop.run(a_request(target, max_tokens=max_tokens), f"rows of {max_tokens}")
        assert again.state is JobState.COMPLETED, again.problem
    assert reference.longest == [63, 255], "those of shorter rows may rely on the longer prompts"
    assert max(kept) == 129 * 64 * 2, "no longer prompt is held whole"


@pytest.mark.parametrize("max_tokens", [(40, 60), (60, 40)])
def test_jobs_of_other_lengths_on_one_engine_share_its_canary(tmp_path, target, reference, max_tokens):
    shop = Shop.open(tmp_path, target, engine=f"{__name__}:{CacheNotingEngine.__name__}")
    made = [shop.submit(a_request(target, max_tokens=longest), str(longest)) for longest in max_tokens]
    shop.plan()
    done = lambda job_id: shop.store.read(jobs.job, job_id).progress.is_captured  # noqa: E731
    capture_until(lambda: all(map(done, made)), Capture(shop.store, shop.settings, "worker"))
    shop.publish()
    assert [shop.store.read(jobs.job, job_id).state for job_id in made] == [JobState.COMPLETED] * 2
    assert reference.longest == [63]
    computed = [event for event in EVENTS if event[0].isdigit()][:4]
    assert computed == ["1 computed", "17 computed", "63 computed", "63 cached"], "they begin alike"


def test_a_reference_without_room_beside_the_start_is_run_when_the_engine_is_up(
    tmp_path, target, reference, monkeypatch
):
    monkeypatch.setattr(canary, "_EARLY_SHARE", 2**62)
    _, job = run(tmp_path, target, PatientEngine)
    assert job.state is JobState.COMPLETED, job.problem
    assert reference.bounds == [0, None]


def test_a_reference_that_is_killed_beside_the_start_is_run_when_the_engine_is_up(
    tmp_path, target, reference
):
    reference.killed = 1
    _, job = run(tmp_path, target, PatientEngine)
    assert job.state is JobState.COMPLETED, job.problem
    assert len(reference.bounds) == 2


def test_the_operators_bound_is_not_tried_twice(tmp_path, target, reference):
    _, job = run(tmp_path, target, PatientEngine, canary_max_bytes=1000)
    assert job.problem is not None
    assert "1000 are allowed" in job.problem.detail
    assert reference.bounds == [1000]


def test_an_engine_that_does_not_start_leaves_no_reference_behind(tmp_path, target, reference):
    name = f"{__name__}:{BrokenEngine.__name__}"
    shop = Shop.open(tmp_path, target, engine=name, unit_attempts=1)
    job_id = shop.submit(a_request(target))
    shop.plan()
    capture = Capture(shop.store, shop.settings, "worker", only_job=job_id)
    asyncio.run(asyncio.wait_for(capture.run(), PATIENCE_S))
    assert shop.store.read(jobs.job, job_id).state is JobState.FAILED
    assert EVENTS == ["reference", "ended"]


def test_the_reference_reads_the_jobs_own_model_where_the_engine_was_started_from_another_folder(
    tmp_path, target, reference
):
    """1. A job without a canary on `latest`, which is overwritten while it runs. 2. One with a canary on a
    checkpoint of the same weights as the engine holds."""
    latest, kept = (Path(copytree(target, tmp_path / "models" / name)) for name in ("latest", "kept"))
    other = random_target(tmp_path / "other", layers=4, hidden=64, max_position=256, seed=1)
    (other / "model.safetensors").rename(latest / "later")
    engine = f"{__name__}:OverwrittenEngine"
    shop = Shop.open(tmp_path, latest, engine=engine, unit_attempts=1, units_in_flight=1)
    shop.submit(a_request(latest).model_copy(update={"canary": "skip"}), "first")
    second = shop.submit(a_request(kept), "second")
    shop.plan()
    shop.capture(second)
    shop.publish()
    job = shop.store.read(jobs.job, second)
    assert job.state is JobState.COMPLETED, job.problem
    assert EVENTS.count("engine") == 1
