"""Pushes one finished job from a dataset folder to its repository, so that a consumer never sees half of it.

Large files go ahead of the commits; then commits of up to 100 files, of which only the last holds the
manifest, the card and the table of jobs. Before every commit, and so also after every error of one, the
repository is read: what is there already drops out, and a commit whose answer was lost is not made twice.
Only the commit with the card and those that delete are guarded by a parent, because the card lists all jobs;
the files of different jobs have different paths. At the end everything is read back.

What is published is never replaced: a repository that holds another run of the job is refused. What a run
left there that never landed, and so is in no manifest, goes with the last commit: the card's globs would take
it for the job's.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.hf_api import RepoFile
from pydantic import ValidationError

from schemas.base import first_fault
from schemas.dataset.entries import FileEntry
from schemas.dataset.jobs_table import JobEntry, JobsTable, git_oid, table_of
from schemas.dataset.manifest import Manifest
from schemas.names import (
    CARD_PATH,
    FINAL_NORM_PATH,
    JOBS_PATH,
    MANIFEST_FOLDER,
    MAX_COMMIT_FILES,
    is_job_id,
    job_folders,
    manifest_path,
    token_freq_path,
)
from schemas.request import HubTarget
from service.artifacts.repository import BRANCH, Patience, Repository
from service.errors import DatasetBroken, HubUnavailable, OptionRefused
from service.publish.assemble import read_manifest
from service.publish.card import render_card, states_config
from service.settings import Settings

UPLOAD_GROUP_FILES = 8
"""Files between two looks at the lease, and what an error of an upload puts at stake."""

OWN_FILES = 3
"""In the last commit: the manifest, the card and the table of jobs."""

ONE_MODEL_CURE = "name another repository: one repository holds the states of one model"


def check_target(hub: HubTarget, settings: Settings, patience: Patience | None = None) -> None:
    """Return if the token may write to `hub`, or may create it. A client waits, so patience is short.

    Raises HubDenied (`hub.repo_id`), OptionRefused (`hub.private`, `hub.config_name`), HubUnavailable.
    """
    states_config(hub.config_name)
    short = Patience(attempts=3, longest_wait_s=3.0, deadline_s=15.0)
    Repository(hub, settings, patience or short).check_right()


def early_batches(files: Sequence[FileEntry]) -> list[Sequence[FileEntry]]:
    """Return the files of every commit but the last, which has room for `OWN_FILES` beside the rest."""
    split = max(0, len(files) - (MAX_COMMIT_FILES - OWN_FILES))
    return [
        files[start : min(start + MAX_COMMIT_FILES, split)] for start in range(0, split, MAX_COMMIT_FILES)
    ]


class JobPush:
    """A push of the job whose manifest stands in `dataset`. It is run once.

    Local files are never deleted. In the repository, Parquet files of this job that no manifest lists are.
    `check` is called between uploads and before commits, `advance` after each commit but the last; both may
    raise.
    """

    def __init__(
        self,
        hub: Repository,
        dataset: Path,
        job_id: str,
        check: Callable[[], None] = lambda: None,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the manifest. Raises DatasetBroken if it is not that of a job alone."""
        self._hub, self._dataset, self._job_id = hub, dataset, job_id
        self._check, self._advance = check, advance
        self._manifest = read_manifest(dataset / manifest_path(job_id))
        self._files = (*self._manifest.shards, *self._manifest.indexes, *self._manifest.extras)
        _refuse_strangers(self._manifest, job_id, self._files)
        self._additions: dict[str, CommitOperationAdd] = {}
        self._entry = JobEntry.of(self._manifest, (dataset / manifest_path(job_id)).read_bytes())
        self._own = self._entry.manifest
        self._entries: dict[str, JobEntry] = {}
        """What is known of the repository's jobs, by the sha256 and by the git name of their manifests."""
        self._tables_read: set[str] = set()

    def run(self) -> str:
        """Return a commit that holds the job whole.

        Raises:
            HubDenied: the token may not write (`hub.repo_id`).
            HubUnavailable: patience is at its end, or what was pushed cannot be read back.
            OptionRefused: the repository holds another model or another run of this job (`hub.repo_id`); it
                is public where a private one was asked for (`hub.private`), or has a configuration of other
                columns (`hub.config_name`).
            DatasetBroken: a local file is not what the manifest says.
        """
        hub = self._hub
        hub.ensure()
        head = hub.head()
        # What cannot be merged is refused before a byte is sent.
        self._refuse_another_run(head)
        self._card_and_table(head)
        for batch in early_batches(self._files):
            hub.patience.retry(partial(self._commit_files, batch), long=True)
        oid = hub.patience.retry(self._commit_last, long=True)
        self._read_back(oid)
        return oid

    def _commit_files(self, batch: Sequence[FileEntry]) -> None:
        self._refuse_another_run(BRANCH)  # another service may have published it meanwhile
        missing = self._missing(batch)
        if missing:
            self._hub.commit(self._upload(missing), f"Add files of {self._job_id}")
            self._additions.clear()  # the client commits each once
            self._advance()

    def _commit_last(self) -> str:
        head = self._hub.head()
        self._refuse_another_run(head)
        described = self._card_and_table(head)
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        # Of all files: another run that has not landed either may have overwritten earlier ones.
        operations += self._upload(self._missing([*self._files, self._own], head))
        operations += [CommitOperationDelete(path) for path in self._stale(head)]
        for path, content in described.items():
            if self._hub.read(path, head) != content:
                operations.append(CommitOperationAdd(path, content))
        if not operations:
            return head
        return self._hub.commit(operations, f"Add {self._job_id}", parent=head)

    def _refuse_another_run(self, revision: str) -> None:
        """Raise OptionRefused if the job is published with other files than these."""
        remote = self._hub.find([self._own.path], revision).get(self._own.path)
        if remote is None or self._is_same(remote, self._own):
            return
        content = self._hub.read(self._own.path, revision) or b""
        with suppress(ValidationError):
            if Manifest.model_validate_json(content).shards == self._manifest.shards:
                return  # this run, whose manifest says more now
        repo_id, job_id = self._hub.target.repo_id, self._job_id
        raise OptionRefused(
            f"{repo_id} holds another run of {job_id}",
            field="hub.repo_id",
            cure="`quarry publish DIR` pushes this dataset, which is kept, to another repository; or delete "
            f"manifests/{job_id}.json, data/{job_id} and index/{job_id} there, and push or resume again",
        )

    def _stale(self, revision: str) -> list[str]:
        """Return the Parquet files at `revision` that the card's globs take for the job's, but are not."""
        named = {entry.path for entry in self._files}
        paths = [
            file.path for folder in job_folders(self._job_id) for file in self._hub.files(folder, revision)
        ]
        return [path for path in paths if path.endswith(".parquet") and path not in named]

    def _card_and_table(self, revision: str) -> dict[str, bytes]:
        """Return what says which jobs are at `revision` and this one, by path.

        Raises OptionRefused if they do not mix.
        """
        norm = next(entry for entry in self._manifest.extras if entry.path == FINAL_NORM_PATH)
        remote = self._hub.find([FINAL_NORM_PATH], revision).get(FINAL_NORM_PATH)
        if remote is not None and not self._is_same(remote, norm):
            detail = f"{self._hub.target.repo_id} holds the states of another model"
            raise OptionRefused(detail, field="hub.repo_id", cure=ONE_MODEL_CURE)
        existing = self._hub.read(CARD_PATH, revision)
        jobs = [*self._others(revision), self._entry]
        card = render_card(
            jobs,
            {self._job_id: states_config(self._hub.target.config_name)},
            existing.decode() if existing is not None else None,
        )
        return {CARD_PATH: card.encode(), JOBS_PATH: table_of(jobs).encode()}

    def _others(self, revision: str) -> list[JobEntry]:
        """Return the other jobs at `revision`: those whose manifest is there."""
        manifests = [
            remote
            for remote in self._hub.files(MANIFEST_FOLDER, revision)
            if is_job_id(Path(remote.path).stem) and remote.path != self._own.path
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
        content = self._hub.read(JOBS_PATH, revision)
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

    def _missing(self, entries: Sequence[FileEntry], revision: str = BRANCH) -> list[FileEntry]:
        remote = self._hub.find([entry.path for entry in entries], revision)
        return [e for e in entries if e.path not in remote or not self._is_same(remote[e.path], e)]

    def _is_same(self, remote: RepoFile, entry: FileEntry) -> bool:
        if remote.lfs is not None:
            return bool((remote.lfs.sha256, remote.size) == (entry.sha256, entry.bytes))
        same_size: bool = remote.size == entry.bytes
        return same_size and remote.blob_id == git_oid(self._local(entry).read_bytes())

    def _upload(self, entries: Sequence[FileEntry]) -> list[CommitOperationAdd]:
        """Return the operations of `entries`, uploaded and proven to be the manifest's bytes."""
        additions: list[CommitOperationAdd] = []
        for start in range(0, len(entries), UPLOAD_GROUP_FILES):
            some = entries[start : start + UPLOAD_GROUP_FILES]
            # Each group has tries of its own: one commit's files may take hours, with an error in each.
            additions += self._hub.patience.retry(partial(self._upload_group, some), long=True)
        self._check()
        return additions

    def _upload_group(self, entries: Sequence[FileEntry]) -> list[CommitOperationAdd]:
        self._check()
        group = [self._addition(entry) for entry in entries]
        self._hub.upload(group)
        for entry, addition in zip(entries, group, strict=True):
            # The client hashed the very bytes that it sent.
            if addition.upload_info.sha256.hex() != entry.sha256:
                raise DatasetBroken(f"{entry.path} no longer has the bytes that were sealed")
        return group

    def _addition(self, entry: FileEntry) -> CommitOperationAdd:
        """Return the operation of a file: one a push, so that what is uploaded is not uploaded again."""
        if entry.path not in self._additions:
            self._additions[entry.path] = CommitOperationAdd(entry.path, self._local(entry))
        return self._additions[entry.path]

    def _local(self, entry: FileEntry) -> Path:
        path = self._dataset / entry.path
        if not path.is_file() or path.stat().st_size != entry.bytes:
            raise DatasetBroken(f"{entry.path} is missing, or no longer {entry.bytes} bytes long")
        return path

    def _read_back(self, oid: str) -> None:
        """Compare all files at `oid` with the manifest: small ones by git's hash, large ones by sha256."""
        for entry in self._missing([*self._files, self._own], oid):
            where = f"{self._hub.target.repo_id} at {oid}"
            raise HubUnavailable(f"{entry.path} was pushed, but {where} does not hold it as it was sealed")


def _refuse_strangers(manifest: Manifest, job_id: str, files: Sequence[FileEntry]) -> None:
    """Refuse a manifest that names files which are not the job's: the folder may be anybody's."""
    if manifest.provenance.job_id != job_id:
        raise DatasetBroken(f"the manifest of {job_id} is that of {manifest.provenance.job_id}")
    if FINAL_NORM_PATH not in [entry.path for entry in files]:
        raise DatasetBroken(f"the manifest of {job_id} names no {FINAL_NORM_PATH}")
    single = {FINAL_NORM_PATH, token_freq_path(job_id)}
    for entry in files:
        if str(PurePosixPath(entry.path).parent) not in job_folders(job_id) and entry.path not in single:
            raise DatasetBroken(f"{entry.path} is no file of a dataset")
