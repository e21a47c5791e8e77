"""A shard that changes between its commit and the manifest: the manifest says what was proven."""

from pathlib import Path

from service.proof.verify import verify_dataset
from tests.drill.damage import shard_of
from tests.drill.harness import assert_caught, findings
from tests.drill.table import PLANTS, Stage
from tests.support import file_plants as plants
from tests.support.jobs import Shop, conversations, request
from tests.support.tiny_model import random_target


def test_a_committed_shard_that_changed_is_not_what_the_manifest_says(tmp_path: Path) -> None:
    """1. Capture. 2. One bit of a committed state is flipped. 3. Publish."""
    target = tmp_path / "models" / "target"
    random_target(target, hidden=64, max_position=512)
    shop = Shop.open(tmp_path, target)
    job_id = shop.submit(request(target, conversations(12)))
    shop.plan()
    shop.capture(job_id)
    dataset = shop.settings.dataset_dir(job_id)
    plants.flip_state(shard_of(dataset))
    shop.publish()
    shop.store.close()
    (plant,) = (plant for plant in PLANTS if plant.stage is Stage.LANDED)
    assert_caught(plant, findings(verify_dataset(dataset)))
