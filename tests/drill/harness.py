"""Runs one planted job through the whole service on the tests' engine, and says what stopped it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from schemas.request import Dtype
from service.capture import canary
from service.proof.reference import reference_states
from service.proof.verify import VerifyReport, verify_dataset
from service.store import commits, jobs
from tests.drill.table import Plant
from tests.support import planted_connector
from tests.support.jobs import Shop, request
from tests.support.model_engine import ModelEngine
from tests.support.plans import random_ids
from tests.support.planted_connector import Order, PlantedHalf
from tests.support.stored_plans import plan_table

LAYERS = (2, 4, 8)
SLOTS = 16
LENGTHS = [2 * SLOTS + SLOTS // 2, 3 * SLOTS - 1, 2 * SLOTS + 1, 1]
NUM_SAMPLES = 24
LOST_S = 3.0
"""How long a receipt that never comes is waited for."""


class PlantedEngine(ModelEngine):
    worker_half = PlantedHalf


class LayerBeforeEngine(PlantedEngine):
    """Captures layer k - 1 under the name of auxiliary layer k."""

    def _states(self, token_ids: list[int]) -> Any:
        *auxiliary, last = self._spec.layer_ids
        return self._forward(token_ids)[0][[*(k - 1 for k in auxiliary), last]]


class LastButOneEngine(PlantedEngine):
    """Captures layer N - 1 under the name of layer N."""

    def _states(self, token_ids: list[int]) -> Any:
        *auxiliary, last = self._spec.layer_ids
        return self._forward(token_ids)[0][[*auxiliary, last - 1]]


@dataclass(frozen=True, slots=True)
class Caught:
    """What stopped a planted job: the class of the problem, or `reject`, or `finding`, and its words."""

    kind: str
    said: str


@dataclass
class Drill:
    """One target, whose reference is computed once; every plant has a service of its own."""

    target: Path
    monkeypatch: pytest.MonkeyPatch
    folder: Path
    runs: int = field(default=0)
    canary: str = "run"
    compression: str = "none"

    def capture(
        self,
        plant: str | None,
        *,
        everywhere: bool = False,
        units_only: bool = False,
        engine: str = "PlantedEngine",
        before: Callable[[Shop, str], None] = lambda shop, job_id: None,
        **settings: Any,
    ) -> Caught | None:
        """Run a job with `plant` in one row, in all, or in all of its units; none: nobody noticed.

        `before` is given the job between its plan and its capture.
        """
        self.runs += 1
        folder = self.folder / str(self.runs)
        timeout_s = LOST_S if plant == "row-lost" else 120.0
        told = {"engine": f"tests.drill.harness:{engine}", "unit_attempts": 1, "receipt_timeout_s": timeout_s}
        shop = Shop.open(folder, self.target, **(told | settings))
        try:
            rows = None if everywhere or units_only else victims
            return self._run(shop, plant, rows, units_only=units_only, before=before)
        finally:
            shop.store.close()

    def _run(
        self,
        shop: Shop,
        plant: str | None,
        rows: Callable[[Shop, str], tuple[int, int]] | None,
        *,
        units_only: bool,
        before: Callable[[Shop, str], None],
    ) -> Caught | None:
        lengths = (LENGTHS * NUM_SAMPLES)[:NUM_SAMPLES]
        samples = [
            {
                "id": f"s{row}",
                "token_ids": ids,
                "loss_mask": [*(row >> place % 5 & 1 for place in range(len(ids) - 1)), 1],
            }
            for row, ids in enumerate(random_ids(lengths, vocab_size=1500))
        ]
        storage = {"shard_bytes": 4_194_304, "compression": self.compression}
        body = request(self.target, samples, layers=LAYERS[:-1], canary=self.canary, storage=storage)
        job_id = shop.submit(body)
        shop.plan()
        path = shop.settings.data_dir / "plant.json"
        self.monkeypatch.setenv(planted_connector.ORDER, str(path))
        if plant is not None:
            row, other = (None, None) if rows is None else rows(shop, job_id)
            Order(plant, str(self.target), row, other, units_only=units_only).save()
        before(shop, job_id)
        shop.capture(job_id)
        shop.publish()
        return outcome(shop, job_id)


def victims(shop: Shop, job_id: str) -> tuple[int, int]:
    """Return two rows of one length, late in a job's first unit."""
    lengths = [len(ids) for ids in plan_table(shop.store, job_id)["input_ids"].to_pylist()]
    full = [row for row, length in enumerate(lengths) if length == lengths[0]]
    first, second = [row for row in full if row > len(lengths) // 3][:2]
    return first, second


def outcome(shop: Shop, job_id: str) -> Caught | None:
    """Say how a job ended; a dataset that nobody objected to is verified, too."""
    job = shop.store.read(jobs.job, job_id)
    if job.problem is not None:
        return Caught(job.problem.type.removeprefix("urn:quarry:"), job.problem.detail)
    assert job.state is JobState.COMPLETED, job
    rejects = shop.store.read(commits.rejects, job_id)
    if rejects:
        return Caught("reject", "; ".join(f"{reject.reason}: {reject.detail}" for reject in rejects))
    return findings(verify_dataset(shop.settings.dataset_dir(job_id)))


def findings(report: VerifyReport) -> Caught | None:
    return None if report.ok else Caught("finding", str(report))


def dataset_of(drill: Drill) -> Path:
    """Return the dataset of a healthy job."""
    assert drill.capture(None) is None
    (dataset,) = (drill.folder / str(drill.runs) / "data" / "jobs").iterdir()
    return dataset


def verified(dataset: Path, scratch: Path, damage: Callable[[Path], None]) -> Caught | None:
    """Verify a damaged copy of `dataset`."""
    copy = scratch / "copy"
    shutil.copytree(dataset, copy)
    damage(copy)
    return findings(verify_dataset(copy))


def assert_caught(plant: Plant, caught: Caught | None) -> None:
    """The planted failure stopped the job, and by the check that should have found it."""
    assert caught is not None, f"{plant.name} survived"
    assert (caught.kind, plant.says in caught.said) == (plant.kind, True), caught


@contextmanager
def one_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute the canary's reference once for all jobs of one target."""
    once: dict[tuple[Path, Dtype], Any] = {}

    async def states(folder: Path, prompts: Any, dtype: Dtype, **more: Any) -> Any:
        if (folder, dtype) not in once:
            once[folder, dtype] = await reference_states(folder, prompts, dtype, **more)
        return once[folder, dtype]

    monkeypatch.setattr(canary, "reference_states", states)
    yield
