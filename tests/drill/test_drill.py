"""Every planted failure is caught by the check that `tests.drill.table` names, at default settings."""

from functools import partial

import pytest

from tests.drill.damage import (
    DATASET,
    PLANNED,
    SEALED,
    SIGNED,
    WRITER,
    between_seal_and_check,
    in_the_writer,
    signed,
)
from tests.drill.harness import assert_caught, verified
from tests.drill.table import LIMITS, PLANTS, Stage

ENGINES = {"layer-before": "LayerBeforeEngine", "last-but-one": "LastButOneEngine"}


def of(*stages: Stage) -> pytest.MarkDecorator:
    plants = [plant for plant in PLANTS if plant.stage in stages]
    return pytest.mark.parametrize("plant", plants, ids=lambda plant: plant.name)


def test_a_healthy_job_passes_every_check(drill):
    assert drill.capture(None) is None


@of(Stage.CACHE, Stage.WORK, Stage.SLAB)
def test_a_failure_in_one_row_is_caught(drill, plant):
    assert_caught(plant, drill.capture(plant.name))


@of(Stage.EVERYWHERE)
def test_a_failure_in_every_row_is_caught_before_the_first_of_them_commits(drill, plant):
    engine = ENGINES.get(plant.name)
    name = None if engine else plant.name
    assert_caught(plant, drill.capture(name, everywhere=True, engine=engine or "PlantedEngine"))


@of(Stage.UNITS)
def test_a_failure_that_spares_what_runs_by_itself_is_caught(drill, plant):
    assert_caught(plant, drill.capture(plant.name, units_only=True))


@of(Stage.SEALED)
def test_a_sealed_file_that_changed_is_caught(drill, plant, monkeypatch):
    between_seal_and_check(monkeypatch, SEALED[plant.name])
    assert_caught(plant, drill.capture(None))


@of(Stage.WRITER)
def test_a_writer_that_was_wrong_is_caught(drill, plant, monkeypatch):
    in_the_writer(monkeypatch, WRITER[plant.name])
    assert_caught(plant, drill.capture(None))


@of(Stage.PLAN)
def test_a_plan_that_changed_is_caught(drill, plant, monkeypatch):
    damage = PLANNED[plant.name]
    assert_caught(plant, drill.capture(None, before=partial(damage, monkeypatch)))


@of(Stage.DATASET)
def test_a_dataset_that_changed_is_caught(dataset, plant, tmp_path):
    assert_caught(plant, verified(dataset, tmp_path, DATASET[plant.name]))


@of(Stage.SIGNED)
def test_a_dataset_that_was_changed_and_signed_again_is_caught(dataset, plant, tmp_path):
    change = SIGNED[plant.name]
    assert_caught(plant, verified(dataset, tmp_path, lambda folder: signed(folder, change)))


@pytest.mark.parametrize("plant", LIMITS, ids=lambda plant: plant.name)
def test_what_no_check_can_see_in_one_row_is_seen_in_every_row(drill, plant):
    assert drill.capture(plant.name) is None
    assert_caught(plant, drill.capture(plant.name, everywhere=True))
