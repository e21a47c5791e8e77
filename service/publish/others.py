"""Checks a job against what its repository already holds."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from schemas.dataset.entries import FileEntry, ShardEntry
from schemas.dataset.jobs_table import MAX_TABLE_BYTES
from schemas.names import CARD_PATH, FINAL_NORM_PATH, JOBS_PATH, MANIFEST_FOLDER, is_job_id, manifest_path
from service import apart
from service.artifacts.dataset_files import MANIFEST_BYTES
from service.artifacts.repository import Repository
from service.errors import OptionRefused
from service.publish.card import Job, states_config
from service.publish.merging import is_of_run, merge
from service.publish.upload import Uploads

R = TypeVar("R")

ONE_MODEL_CURE = "name another repository: one repository holds the states of one model"


class OtherJobs:
    """The other jobs in `hub`, from one job's view."""

    def __init__(self, hub: Repository, uploads: Uploads, job_id: str) -> None:
        self._hub, self._uploads, self._job_id = hub, uploads, job_id
        self._merged: dict[str, dict[str, bytes]] = {}
        """By revision; each revision is read once."""

    def merged(self, job: Job, norm: FileEntry, revision: str) -> dict[str, bytes]:
        """Return card and table of this job and those at `revision`, by path; empty while it is in capture.

        `norm` is the target's final norm. Raises OptionRefused if the jobs do not mix.
        """
        if revision in self._merged:
            return self._merged[revision]
        self._refuse_another_model(norm, revision)
        manifests = {
            remote.path: remote.lfs.sha256 if remote.lfs else remote.blob_id
            for remote in self._hub.files(MANIFEST_FOLDER, revision)
            if is_job_id(Path(remote.path).stem) and remote.path != manifest_path(self._job_id)
        }
        card = self._hub.read(CARD_PATH, revision)
        table = self._hub.read(JOBS_PATH, revision, MAX_TABLE_BYTES) if manifests else None
        config = {self._job_id: states_config(self._hub.target.config_name)}
        # A process takes half a second, and a new repository holds nothing untrusted.
        read = partial(self._read, merge) if card or table else merge
        merged = read(self._hub.target.repo_id, job, config, card, table, manifests)
        return self._merged.setdefault(revision, merged)

    def refuse_another_run(
        self, shards: Sequence[ShardEntry], revision: str, manifest: FileEntry | None = None
    ) -> None:
        """Raise OptionRefused if the repository already has a manifest of this job with other shards.

        With `manifest`, `shards` are all shards of this run; without it, those so far.
        """
        path = manifest_path(self._job_id)
        remote = self._hub.find([path], revision).get(path)
        if remote is None or (manifest is not None and self._uploads.is_same(remote, manifest)):
            return
        content = self._hub.read(path, revision, MANIFEST_BYTES) or b""
        if self._read(is_of_run, content, shards, manifest is not None):
            return
        repo_id, job_id = self._hub.target.repo_id, self._job_id
        raise OptionRefused(
            f"{repo_id} holds another run of {job_id}",
            field="hub.repo_id",
            cure="`quarry publish DIR` pushes this dataset, which is kept, to another repository; or delete "
            f"manifests/{job_id}.json, data/{job_id} and index/{job_id} there, and push or resume again",
        )

    def _refuse_another_model(self, norm: FileEntry, revision: str) -> None:
        remote = self._hub.find([FINAL_NORM_PATH], revision).get(FINAL_NORM_PATH)
        if remote is not None and not self._uploads.is_same(remote, norm):
            detail = f"{self._hub.target.repo_id} holds the states of another model"
            raise OptionRefused(detail, field="hub.repo_id", cure=ONE_MODEL_CURE)

    def _read(self, function: Callable[..., R], *args: object) -> R:
        """Call a function that reads untrusted content of the repository, in a process of its own."""
        settings = self._hub.settings
        memory_bytes, deadline_s = settings.plan_memory_bytes, settings.plan_silence_s
        try:
            return apart.call(function, *args, memory_bytes=memory_bytes, deadline_s=deadline_s)
        except apart.Ended as error:
            detail = f"the process that read what {self._hub.target.repo_id} holds {error}"
            fix = f"fix {CARD_PATH}, {JOBS_PATH} and {MANIFEST_FOLDER} there"
            cure = f"name another repository, {fix}, or raise QUARRY_PLAN_MEMORY_BYTES"
            raise OptionRefused(detail, field="hub.repo_id", cure=cure) from error
