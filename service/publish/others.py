"""What a repository holds already, held against a job that is to stand beside it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.hf_api import RepoFile
from pydantic import ValidationError

from schemas.base import first_fault
from schemas.dataset.entries import FileEntry, ShardEntry
from schemas.dataset.jobs_table import JobEntry, JobsTable, table_of
from schemas.dataset.manifest import Manifest
from schemas.identity import Provenance
from schemas.names import (
    CARD_PATH,
    FINAL_NORM_PATH,
    JOBS_PATH,
    MANIFEST_FOLDER,
    is_job_id,
    manifest_path,
)
from service.artifacts.repository import Repository
from service.errors import OptionRefused
from service.publish.card import Job, grouped, render_card, states_config
from service.publish.upload import Uploads

MAX_TABLE_BYTES = 2**24
"""Of the table of jobs: some thousands of them. What a stranger wrote there may take sixty times as much."""
ONE_MODEL_CURE = "name another repository: one repository holds the states of one model"


@dataclass(frozen=True, slots=True)
class BegunJob:
    """A job that is being captured, by what decides whether it may stand beside others."""

    job_id: str
    provenance: Provenance
    config_name: str


class OtherJobs:
    """The jobs of `hub` beside one job."""

    def __init__(self, hub: Repository, uploads: Uploads, job_id: str) -> None:
        """Read nothing yet."""
        self._hub, self._uploads, self._job_id = hub, uploads, job_id
        self._entries: dict[str, JobEntry] = {}
        """What is known of the repository's jobs, by the sha256 and by the git name of their manifests."""
        self._tables_read: set[str] = set()

    def refuse_mixed(self, provenance: Provenance, norm: FileEntry, revision: str) -> None:
        """Raise OptionRefused if a job that is being captured cannot stand beside those at `revision`.

        `norm` is the target's final norm.
        """
        self._refuse_another_model(norm, revision)
        existing = self._card(revision)
        begun = BegunJob(provenance.job_id, provenance, self._hub.target.config_name)
        beside: list[Job] = [*self._others(revision), begun]
        grouped(beside, self._config, existing)

    def described(self, entry: JobEntry, norm: FileEntry, revision: str) -> dict[str, bytes]:
        """Return what says which jobs are at `revision` and this one, by path.

        Raises OptionRefused if they do not mix.
        """
        self._refuse_another_model(norm, revision)
        existing = self._card(revision)
        jobs = [*self._others(revision), entry]
        card = render_card(jobs, self._config, existing)
        return {CARD_PATH: card.encode(), JOBS_PATH: table_of(jobs).encode()}

    def refuse_another_run(
        self, shards: Sequence[ShardEntry], revision: str, manifest: FileEntry | None = None
    ) -> None:
        """Raise OptionRefused if the job is published with other shards.

        `shards` are all of this run, with its `manifest`; or those so far.
        """
        path = manifest_path(self._job_id)
        remote = self._hub.find([path], revision).get(path)
        if remote is None or (manifest is not None and self._uploads.is_same(remote, manifest)):
            return
        content = self._hub.read(path, revision) or b""
        with suppress(ValidationError):
            theirs = Manifest.model_validate_json(content).shards
            if theirs == shards or (manifest is None and all(shard in theirs for shard in shards)):
                return  # this run, whose manifest may say more now
        repo_id, job_id = self._hub.target.repo_id, self._job_id
        raise OptionRefused(
            f"{repo_id} holds another run of {job_id}",
            field="hub.repo_id",
            cure="`quarry publish DIR` pushes this dataset, which is kept, to another repository; or delete "
            f"manifests/{job_id}.json, data/{job_id} and index/{job_id} there, and push or resume again",
        )

    @property
    def _config(self) -> dict[str, str]:
        return {self._job_id: states_config(self._hub.target.config_name)}

    def _card(self, revision: str) -> str | None:
        existing = self._hub.read(CARD_PATH, revision)
        return None if existing is None else existing.decode()

    def _refuse_another_model(self, norm: FileEntry, revision: str) -> None:
        remote = self._hub.find([FINAL_NORM_PATH], revision).get(FINAL_NORM_PATH)
        if remote is not None and not self._uploads.is_same(remote, norm):
            detail = f"{self._hub.target.repo_id} holds the states of another model"
            raise OptionRefused(detail, field="hub.repo_id", cure=ONE_MODEL_CURE)

    def _others(self, revision: str) -> list[JobEntry]:
        """Return the other jobs at `revision`: those whose manifest is there."""
        manifests = [
            remote
            for remote in self._hub.files(MANIFEST_FOLDER, revision)
            if is_job_id(Path(remote.path).stem) and remote.path != manifest_path(self._job_id)
        ]
        return [self._entry_of(remote, revision) for remote in manifests]

    def _entry_of(self, remote: RepoFile, revision: str) -> JobEntry:
        """Return what the table of jobs says of a manifest in the repository.

        Raises OptionRefused if it says nothing of it, or is of another version.
        """
        self._read_table(revision)
        known = self._entries.get(remote.lfs.sha256 if remote.lfs else remote.blob_id)
        if known is None or known.manifest.path != remote.path:
            raise self._table_refused(f"does not list {remote.path} as it is there")
        return known

    def _read_table(self, revision: str) -> None:
        """Learn what the table of jobs says, if the repository has one."""
        if revision in self._tables_read:
            return
        self._tables_read.add(revision)
        content = self._hub.read(JOBS_PATH, revision, MAX_TABLE_BYTES)
        try:
            rows = JobsTable.model_validate_json(content).jobs if content is not None else ()
        except ValidationError as error:
            raise self._table_refused(f"is not a table of this version: {first_fault(error)}") from error
        for job in rows:
            self._entries[job.manifest.sha256] = self._entries[job.manifest_git_oid] = job

    def _table_refused(self, detail: str) -> OptionRefused:
        return OptionRefused(
            f"{JOBS_PATH} in {self._hub.target.repo_id} {detail}",
            field="hub.repo_id",
            cure=f"name another repository, or bring {JOBS_PATH} back as the last push of a job left it",
        )
