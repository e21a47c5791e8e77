"""The drill can fail: with a check switched off, what it alone should find is found late or not at all."""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import pytest

from connector import shards
from connector.repeats import RepeatCheck
from connector.rowcheck import RowChecker
from connector.shards import UnitWriter
from schemas.dataset.entries import LayerStats
from service.capture import unit_run
from service.capture.canary import Canary
from service.proof import checks, row_proof, verify
from service.proof.logit_check import LogitVerdict
from tests.drill.damage import DATASET, PLANNED, SEALED, WRITER, between_seal_and_check, in_the_writer
from tests.drill.harness import Caught, Drill, assert_caught, verified
from tests.drill.table import PLANTS, Check, Plant, Stage
from tests.support.plants import EXCHANGED, JOBS, SLABS, STATES

Patch = Callable[[pytest.MonkeyPatch], None]
ENGINES_OF_THEIR_OWN = {"layer-before", "last-but-one"}


def _nothing(*_: Any, **__: Any) -> None:
    """Find nothing."""


async def _pass(*_: Any) -> None:
    """Let every engine pass."""


def _readings(self: RowChecker, states: Any, layer_ids: Any, look: Any) -> tuple[LayerStats, ...]:
    return tuple(LayerStats(layer_id=one, mean_rms=1.0, max_abs=1.0) for one in layer_ids)


def _planned(self: UnitWriter, job: Any) -> tuple[Any, Any]:
    return tuple(self._plan[name][job.ref.row].values.to_numpy() for name in ("input_ids", "loss_mask"))


def _any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    read = unit_run.unpacked
    monkeypatch.setattr(unit_run, "unpacked", lambda plan, _: read(plan, sha256(plan).hexdigest()))


def _any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_check_footer", _nothing)
    monkeypatch.setattr(checks, "_check_bytes", _nothing)


OFF: dict[Check, tuple[Patch, str]] = {
    Check.PLAN: (_any_plan, "bit-of-the-plan"),
    Check.ACCOUNT: (lambda m: m.setattr(UnitWriter, "_ids_and_mask", _planned), "other-token-ids"),
    Check.SENTINELS: (lambda m: m.setattr(RowChecker, "_refuse_sentinels", _nothing), "never-stored"),
    Check.VALUES: (lambda m: m.setattr(RowChecker, "check", _readings), "zero-block"),
    Check.COPY: (lambda m: m.setattr(shards, "_refuse_changed", _nothing), "flipped-bit-in-memory"),
    Check.SEEN: (lambda m: m.setattr(RepeatCheck, "check", _nothing), "stale-block"),
    Check.CANARY: (lambda m: m.setattr(Canary, "run", _pass), "layer-before"),
    Check.SECOND: (lambda m: m.setattr(unit_run, "run_again", _pass), "exchanged-layers"),
    Check.RECEIPT: (_any_file, "columns-exchanged"),
    Check.UNIT: (lambda m: m.setattr(checks, "_plan_fault", _nothing), "mask-of-another-row"),
    Check.NAME: (lambda m: m.setattr(row_proof, "name_fault", _nothing), "mask-changed-before-hashing"),
    Check.LAST: (
        lambda m: m.setattr(checks, "check_logits", lambda *_: LogitVerdict(0, 0, 0.0, ())),
        "exchanged-rows",
    ),
    Check.VERIFY: (lambda m: m.setattr(verify, "_file_faults", lambda *_: iter(())), "bit-of-the-counts"),
}
PROVEN_ELSEWHERE = {Check.SILENCE, Check.PUSH}
"""Without the first a job would hang; the second is the client's own hash."""


def run(plant: Plant, drill: Drill, monkeypatch: pytest.MonkeyPatch, dataset: Any) -> Caught | None:
    """Plant one failure, wherever its stage is."""
    if plant.stage is Stage.DATASET:
        return verified(dataset, drill.folder, DATASET[plant.name])
    if plant.stage is Stage.SEALED:
        between_seal_and_check(monkeypatch, SEALED[plant.name])
    elif plant.stage is Stage.WRITER:
        in_the_writer(monkeypatch, WRITER[plant.name])
    elif plant.stage is Stage.PLAN:
        return drill.capture(None, before=partial(PLANNED[plant.name], monkeypatch))
    elif plant.stage is Stage.EVERYWHERE:
        return drill.capture(None, engine="LayerBeforeEngine")
    elif plant.stage is Stage.UNITS:
        return drill.capture(plant.name, units_only=True)
    else:
        return drill.capture(plant.name)
    return drill.capture(None)


@pytest.mark.slow
@pytest.mark.parametrize("check", [*OFF], ids=lambda check: check.name.lower())
def test_the_drill_fails_without_a_check(check, drill, monkeypatch, dataset):
    switch_off, name = OFF[check]
    plant = next(plant for plant in PLANTS if plant.check is check and plant.name == name)
    switch_off(monkeypatch)
    with pytest.raises(AssertionError, match=r"survived|Caught\("):
        assert_caught(plant, run(plant, drill, monkeypatch, dataset))


def test_every_check_and_every_stage_has_a_plant_and_every_plant_is_in_the_table():
    assert {plant.check for plant in PLANTS} == set(Check) == {*OFF, *PROVEN_ELSEWHERE}
    assert {plant.stage for plant in PLANTS} == set(Stage)
    of_rows = {plant.name for plant in PLANTS if plant.stage in (Stage.CACHE, Stage.WORK, Stage.SLAB)}
    of_engines = {plant.name for plant in PLANTS if plant.stage is Stage.EVERYWHERE}
    assert {*STATES, *JOBS, *SLABS, EXCHANGED} == of_rows | of_engines - ENGINES_OF_THEIR_OWN
    for stage, table in ((Stage.SEALED, SEALED), (Stage.WRITER, WRITER), (Stage.DATASET, DATASET)):
        assert {*table} == {plant.name for plant in PLANTS if plant.stage is stage}
