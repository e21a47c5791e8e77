"""A job is merged into what its repository holds: card and table say the same of every job."""

from pathlib import Path

from schemas.dataset.jobs_table import JobEntry
from schemas.names import CARD_PATH, JOBS_PATH, job_id_from_content, manifest_path
from service.publish.card import assigned_configs
from service.publish.merging import merge
from tests.support.finished_job import JOB, OTHER_JOB, a_dataset, an_identity

THIRD_JOB = job_id_from_content("third")


def entry_of(folder: Path, job_id: str, **changes: object) -> JobEntry:
    return JobEntry.of(a_dataset(folder, job_id, **changes), (folder / manifest_path(job_id)).read_bytes())


def test_a_card_that_a_person_removed_comes_back_with_the_configuration_of_each_job(tmp_path: Path) -> None:
    """Which the manifest does not say: a push, or a schedule's new recipe, may have chosen another one."""
    first, third = (entry_of(tmp_path / job_id, job_id) for job_id in (JOB, THIRD_JOB))
    other = entry_of(tmp_path / OTHER_JOB, OTHER_JOB, about=an_identity(layer_ids=(1, 4)))
    pushed: dict[str, bytes] = {}
    manifests: dict[str, str] = {}
    for job, config in ((first, "states"), (other, "early"), (third, "states")):
        card, table = pushed.get(CARD_PATH), pushed.get(JOBS_PATH)
        if job is third:
            card = None
        pushed = merge("org/states", job, {job.job_id: config}, card, table, manifests)
        manifests[job.manifest.path] = job.manifest.sha256
    assert assigned_configs(pushed[CARD_PATH].decode()) == {
        JOB: "states",
        OTHER_JOB: "early",
        THIRD_JOB: "states",
    }
