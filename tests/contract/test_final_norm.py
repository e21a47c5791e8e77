"""The target's final norm is kept when the first unit is captured: publication needs no weights."""

import shutil
from pathlib import Path

from schemas.job import JobState
from schemas.names import FINAL_NORM_PATH
from service.proof.head import Head
from service.proof.verify import verify_dataset
from service.store import jobs
from tests.support.jobs import Shop, conversations, request
from tests.support.tiny_model import random_target


def test_a_model_that_changes_or_goes_after_the_last_unit_does_not_change_the_dataset(tmp_path: Path) -> None:
    target = random_target(tmp_path / "models" / "mine", arch="llama", hidden=64, max_position=256)
    shop = Shop.open(tmp_path, target)
    job_id = shop.submit(request(target, conversations(5, longest=4)))
    shop.plan()
    shop.capture(job_id)
    norm = Head.load(target, "float32").final_norm_file
    shutil.rmtree(target)
    shop.publish()
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.COMPLETED, job.problem
    dataset = shop.settings.dataset_dir(job_id)
    assert (dataset / FINAL_NORM_PATH).read_bytes() == norm
    assert verify_dataset(dataset).ok
    shop.store.close()
