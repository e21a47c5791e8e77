"""What is planted into states is caught in a job that stores them lossily too, by the same checks."""

import pytest

from schemas.dataset.columns import layer_columns
from schemas.dataset.manifest import Manifest
from tests.drill.damage import DATASET, SEALED, between_seal_and_check, in_the_writer
from tests.drill.harness import LAYERS, Drill, assert_caught, dataset_of, verified
from tests.drill.table import PLANTS, Check, Plant, Stage
from tests.drill.test_drill import ENGINES
from tests.support import file_plants

pytestmark = pytest.mark.slow

STATES = (*layer_columns(LAYERS, "fp8"), "checksums")


def planted(*stages: Stage) -> list[Plant]:
    return [plant for plant in PLANTS if plant.stage in stages and plant.check is not Check.SILENCE]


def of_states(*stages: Stage) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("plant", planted(*stages), ids=lambda plant: plant.name)


def named(stage: Stage, name: str) -> Plant:
    return next(plant for plant in PLANTS if (plant.stage, plant.name) == (stage, name))


@pytest.fixture
def lossy(drill: Drill) -> Drill:
    drill.compression = "fp8"
    return drill


def test_a_healthy_job_passes_every_check(lossy):
    assert lossy.capture(None) is None


def test_the_canary_judges_what_was_captured_and_not_what_is_stored(drill):
    reports = []
    for compression in ("none", "fp8"):
        drill.compression = compression
        (path,) = dataset_of(drill).glob("manifests/*.json")
        reports.append(Manifest.model_validate_json(path.read_bytes()).checks.canary_report)
    plain, lossy = reports
    assert plain is not None and lossy is not None
    assert plain.layers == lossy.layers


@of_states(Stage.CACHE, Stage.SLAB)
def test_a_failure_in_one_row_is_caught(lossy, plant):
    assert_caught(plant, lossy.capture(plant.name))


@of_states(Stage.EVERYWHERE)
def test_a_failure_in_every_row_is_caught_before_the_first_of_them_commits(lossy, plant):
    engine = ENGINES.get(plant.name)
    name = None if engine else plant.name
    assert_caught(plant, lossy.capture(name, everywhere=True, engine=engine or "PlantedEngine"))


def test_a_sealed_file_that_changed_is_caught(lossy, monkeypatch):
    between_seal_and_check(monkeypatch, SEALED["bit-of-a-state"])
    assert_caught(named(Stage.SEALED, "bit-of-a-state"), lossy.capture(None))


def test_a_writer_that_exchanged_the_states_of_two_rows_is_caught(lossy, monkeypatch):
    in_the_writer(monkeypatch, file_plants.exchange(*STATES))
    assert_caught(named(Stage.WRITER, "states-exchanged"), lossy.capture(None))


@pytest.mark.parametrize("column", ["layer_2", "layer_2_scale"])
def test_codes_or_scales_of_another_row_are_caught(lossy, monkeypatch, column):
    in_the_writer(monkeypatch, file_plants.exchange(column))
    caught = lossy.capture(None)
    assert caught is not None
    assert (caught.kind, "layer 2: its bytes have xxh3" in caught.said) == ("states-wrong", True)


def test_a_dataset_that_changed_is_caught(lossy, tmp_path):
    plant = named(Stage.DATASET, "bit-of-a-state")
    assert_caught(plant, verified(dataset_of(lossy), tmp_path, DATASET[plant.name]))
