"""What is known of jobs and schedules from what was done to the service, and what datasets must hold.

Nothing of the service decides here what is right: a row is known by its tokens, a model by the bytes of its
files, and states are those of a transformers forward pass of the checkpoint that had these bytes.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from schemas.job import JobState
from service.plan.model_folder import weights_digest
from service.reader import QuarryDataset
from service.store import JobRow
from tests.support.model_engine import LOADING
from tests.support.tiny_model import random_target
from tests.support.whole_model import whole_states

Tokens = tuple[int, ...]
NUM_LAYERS = 2
NUM_CHECKPOINTS = 3
OWNERS = (None, "ann", "bob")
FIRST = 30
"""The second token of sample 0."""
CLOSE = 0.05
"""Of the largest state: rounding is far below, and the states of another checkpoint are far above."""


class Checkpoints:
    """Some checkpoints of one shape, kept apart from the folders that jobs name."""

    def __init__(self, folder: Path) -> None:
        self._folders = [
            random_target(
                folder / str(number), layers=NUM_LAYERS, hidden=64, vocab=300, max_position=64, seed=number
            )
            for number in range(NUM_CHECKPOINTS)
        ]
        self._states = cache(self._computed)
        self._by_digest = {weights_digest(one): number for number, one in enumerate(self._folders)}
        assert len(self._by_digest) == NUM_CHECKPOINTS

    def write(self, number: int, folder: Path, *, renamed: bool = False) -> None:
        """Make a model's folder, or overwrite its weights: their file, or by another of that name."""
        weights = folder / "model.safetensors"
        if not folder.exists():
            shutil.copytree(self._folders[number], folder)
        elif renamed:
            beside = weights.with_suffix(".new")
            beside.write_bytes(self._weights(number).read_bytes())
            beside.rename(weights)
        else:
            with weights.open("r+b") as file:  # it never shrinks: whoever has it mapped would die of that
                file.write(self._weights(number).read_bytes())

    def _weights(self, number: int) -> Path:
        return self._folders[number] / "model.safetensors"

    def number_of(self, weights_sha256: str) -> int | None:
        """Return the checkpoint that a dataset's identity names."""
        return self._by_digest.get(weights_sha256)

    def _computed(self, number: int, tokens: Tokens) -> dict[int, torch.Tensor]:
        with LOADING:
            return whole_states(self._folders[number], [tokens], torch.bfloat16)[0]

    def likeness(self, number: int, tokens: Tokens, layer_id: int, states_TH: torch.Tensor) -> bool:
        """Say whether states are those of a checkpoint."""
        expected = self._states(number, tokens)[layer_id].float()
        got = states_TH.float()
        return bool((got - expected).abs().max() <= CLOSE * expected.abs().max())

    def norm(self, number: int) -> torch.Tensor:
        """Return the final norm's weight."""
        from safetensors.torch import load_file

        return load_file(self._weights(number))["model.norm.weight"]


def tokens_of(owner: str | None, number: int) -> Tokens:
    """Return the tokens of an owner's sample; no two samples share them."""
    return (
        20 + OWNERS.index(owner),
        FIRST + number,
        *(40 + (number * 7 + place) % 200 for place in range(number % 4)),
    )


def sample(owner: str | None, number: int, *, named: bool = True) -> dict[str, Any]:
    """Return an owner's sample as a user writes it."""
    name = {"id": f"s{number}"} if named else {}
    return {**name, "token_ids": list(tokens_of(owner, number))}


def rows_of(owner: str | None, numbers: Iterable[int]) -> frozenset[Tokens]:
    return frozenset(tokens_of(owner, number) for number in numbers)


@dataclass(eq=False)
class ScheduleRecord:
    """A schedule from its addition to its removal; one that is added again under its name is another."""

    name: str
    owner: str | None
    kind: str
    takes_all: bool
    model: str
    layers: tuple[int, ...]
    source: str | None
    canary: str
    posted: set[Tokens] = field(default_factory=set)
    written: Counter[tuple[int, Tokens]] = field(default_factory=Counter)
    """By checkpoint; of completed jobs, those deleted since included."""
    counted: set[str] = field(default_factory=set)
    models: set[int] = field(default_factory=set)
    """Checkpoints that the model's folder has held since the schedule was added."""
    removed: bool = False
    given_back: bool = False
    """A job that had not completed was deleted: what it took may come after a job that was there."""


@dataclass(eq=False)
class JobRecord:
    """A job from its submission on."""

    id: str
    key: str | None
    owner: str | None
    model: str
    layers: tuple[int, ...]
    body: dict[str, Any]
    checkpoints: set[int]
    """Those that the model's folder has held before the job completed."""
    sources: list[frozenset[Tokens]]
    """What the source has given before the job completed; for posted samples, empty."""
    schedule: ScheduleRecord | None = None
    must: frozenset[Tokens] = frozenset()
    """What a schedule's job must write, unless an earlier one has: all there was at its slot."""
    excuses: set[str] = field(default_factory=set)
    """Why it may fail or be blocked."""
    completed: bool = False
    deleted: bool = False


@dataclass
class Found:
    """A dataset as its reader gives it."""

    checkpoint: int
    rows: list[Tokens]


def check_job(checkpoints: Checkpoints, job: JobRow, record: JobRecord, dataset: Path) -> Found | None:
    """Hold a completed job's dataset against what its model and source gave; none where it wrote no row."""
    record.completed = True
    assert job.owner == record.owner
    if job.progress.samples_written == 0:
        assert record.schedule is not None, f"{job.id} wrote nothing"
        return None
    manifest = json.loads((dataset / "manifests" / f"{job.id}.json").read_bytes())
    identity = manifest["provenance"]["identity"]
    said = manifest["checks"]["canary"]
    assert (said == "skipped by request") == (record.body["canary"] == "skip"), f"{job.id}: canary {said}"
    expected_layers = sorted({*record.layers, NUM_LAYERS})
    assert identity["layer_ids"] == expected_layers, f"{job.id} says layers {identity['layer_ids']}"
    checkpoint = checkpoints.number_of(identity["weights_sha256"])
    assert checkpoint is not None, f"{job.id} names a checkpoint that never was"
    assert checkpoint in record.checkpoints, f"{job.id}: checkpoint {checkpoint} of {record.checkpoints}"
    read = QuarryDataset(dataset)
    assert list(read.about.layer_ids) == expected_layers, f"{job.id} holds layers {read.about.layer_ids}"
    rows = []
    for number in range(len(read)):
        row = read.row(number)
        tokens = tuple(row.input_ids.tolist())
        for layer_id in expected_layers:
            states = row.layer(layer_id)
            assert checkpoints.likeness(checkpoint, tokens, layer_id, states), (
                f"{job.id}: layer {layer_id} of {tokens} is not of checkpoint {checkpoint}"
            )
        rows.append(tokens)
    norm = next(iter(read_tensors(dataset / "final_norm.safetensors").values()))
    assert torch.equal(norm.float(), checkpoints.norm(checkpoint).float()), f"{job.id}: another final norm"
    check_rows(job, record, rows)
    return Found(checkpoint, rows)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for name, tensor in load_file(path).items() if "weight" in name or len(tensor) > 1}


def check_rows(job: JobRow, record: JobRecord, rows: Sequence[Tokens]) -> None:
    """Each row is there once, and is the owner's and the source's."""
    twice = [tokens for tokens, count in Counter(rows).items() if count > 1]
    assert not twice, f"{job.id} holds rows twice: {twice}"
    foreign = [tokens for tokens in rows if tokens[0] != 20 + OWNERS.index(record.owner)]
    assert not foreign, f"{job.id} of {record.owner} holds rows of another owner: {foreign}"
    got, schedule = frozenset(rows), record.schedule
    if schedule is None or (schedule.takes_all and schedule.kind == "file"):
        assert got in record.sources, f"{job.id} holds {sorted(got)}, its source gave {record.sources}"
    elif schedule.kind == "file":
        known = frozenset().union(*record.sources)
        assert got <= known, f"{job.id} holds rows that its source never had: {sorted(got - known)}"
    else:
        assert got <= schedule.posted, f"{job.id} holds rows that were never posted to its schedule"
    assert len(rows) == job.progress.samples_written, (
        f"{job.id} says {job.progress.samples_written} rows and holds {len(rows)}"
    )


def check_schedule(job: JobRow, record: JobRecord, found: Found | None, *, stopped: bool) -> None:
    """What a schedule's completed jobs wrote is there once, and all that there was at a whole job's slot.

    A `stopped` job of a schedule that takes all keeps what it took.
    """
    schedule = record.schedule
    assert schedule is not None
    if job.id not in schedule.counted:
        schedule.counted.add(job.id)
        if found is not None:
            schedule.written.update((found.checkpoint, tokens) for tokens in found.rows)
    if schedule.kind == "posted" or not schedule.takes_all:
        twice = [one for one, count in schedule.written.items() if count > 1]
        assert not twice, f"schedule {schedule.name} wrote twice: {twice}"
    is_whole = job.progress.samples_given_up == 0 and len(schedule.models) == 1
    keeps = schedule.takes_all and (schedule.kind == "file" or stopped)
    if is_whole and not keeps and not schedule.given_back:
        lost = record.must - {tokens for _, tokens in schedule.written}
        assert not lost, f"schedule {schedule.name} lost {sorted(lost)}: job {job.id} has completed"


ACCEPTED = {JobState.COMPLETED, JobState.CANCELLED, JobState.PAUSED, JobState.DELETING}
MODEL_CHANGED, SOURCE_CHANGED = "its model was overwritten", "its source was overwritten"
RECIPE_CHANGED, NOTHING_POSTED = "its recipe changed", "nothing was posted"
SCHEDULE_REMOVED, NO_SPACE = "its schedule was removed", "the disk was full"
ENGINE_FAILED, GIVEN_UP = "its engine failed", "the data folder was given up"
EXCUSED = {
    MODEL_CHANGED: {"identity-changed", "recipe-changed"},
    SOURCE_CHANGED: {"identity-changed", "source-refused"},
    RECIPE_CHANGED: {"recipe-changed", "identity-changed"},
    NOTHING_POSTED: {"source-refused"},
    SCHEDULE_REMOVED: {"source-refused"},
    NO_SPACE: {"disk-full"},
    ENGINE_FAILED: {"engine-refused", "engine-died"},
    GIVEN_UP: {"option-refused"},
}
"""What a job that fails or is blocked may name, by what happened to it."""


def check_state(job: JobRow, record: JobRecord) -> None:
    """A job does not fail unless something went wrong for it, and then names that."""
    if job.state not in ACCEPTED:
        problem, said = ("", None) if job.problem is None else (job.problem.type, job.problem.detail)
        allowed = set().union(*(EXCUSED[excuse] for excuse in record.excuses))
        reason = f"{job.id} is {job.state.value}: {said}; what happened to it: {sorted(record.excuses)}"
        assert problem.rpartition(":")[2] in allowed, reason
