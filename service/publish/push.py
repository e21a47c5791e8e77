"""Pushes one finished job from a dataset folder to its repository, so that a consumer never sees half of it.

Large files go ahead of the commits; then commits of up to 100 files, of which only the last holds the
manifest, the card and the table of jobs. Before every commit, and so also after every error of one, the
repository is read: what is there already drops out, and a commit whose answer was lost is not made twice.
Only the commit with the card and those that delete are guarded by a parent, because the card lists all jobs;
the files of different jobs have different paths. At the end everything is read back.

A job's id does not say what its rows are: a source may change under its name. A repository that holds other
rows of the job is therefore refused. What another run of the same rows left is replaced in one commit, so
that no reader ever finds files of two runs behind the card's globs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.hf_api import RepoFile
from pydantic import ValidationError

from schemas.base import first_fault
from schemas.dataset.jobs_table import JobEntry, JobsTable, git_oid, table_of
from schemas.dataset.manifest import FileEntry, Manifest
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
from service.errors import DatasetBroken, HubUnavailable, OptionRefused
from service.publish.assemble import read_manifest
from service.publish.card import render_card, states_config
from service.publish.extras import file_entry
from service.publish.hub import BRANCH, Hub

UPLOAD_GROUP_FILES = 8
"""Files between two looks at the lease, and what an error of an upload puts at stake."""

OWN_FILES = 3
"""In the last commit: the manifest, the card and the table of jobs."""

MAX_REPLACED_FILES = MAX_COMMIT_FILES - OWN_FILES
"""Files that one commit may replace or delete beside them."""

ONE_MODEL_CURE = "name another repository: one repository holds the states of one model"


def push_job(
    hub: Hub,
    dataset: Path,
    job_id: str,
    check: Callable[[], None] = lambda: None,
    advance: Callable[[int], None] = lambda reached: None,
) -> str:
    """Push the job whose manifest stands in `dataset`; return a commit that holds it whole.

    Nothing is deleted here. There, Parquet files of the job that its manifest does not name are: another run
    of the same rows left them, or a push that never landed. `check` is called between uploads and before
    commits, `advance` after each with how far the push has got (see `Delay`); both may raise.

    Raises:
        HubDenied: the token may not write (`hub.repo_id`).
        HubUnavailable: patience is at its end, or what was pushed cannot be read back.
        OptionRefused: the repository holds another model, other rows of this job, or more files of another
            run of it than one commit replaces (`hub.repo_id`); it is public where a private one was asked for
            (`hub.private`), or has a configuration of other columns (`hub.config_name`).
        DatasetBroken: a local file is not what the manifest says.
    """
    return _Push(hub, dataset, job_id, check, advance).run()


def batches(files: Sequence[FileEntry]) -> tuple[list[Sequence[FileEntry]], Sequence[FileEntry]]:
    """Split a job's files into full commits and the last, which has room for `OWN_FILES`."""
    split = max(0, len(files) - (MAX_COMMIT_FILES - OWN_FILES))
    early = [
        files[start : start + MAX_COMMIT_FILES][: split - start]
        for start in range(0, split, MAX_COMMIT_FILES)
    ]
    return early, files[split:]


class _Push:
    def __init__(
        self,
        hub: Hub,
        dataset: Path,
        job_id: str,
        check: Callable[[], None],
        advance: Callable[[int], None],
    ) -> None:
        self._hub, self._dataset, self._job_id = hub, dataset, job_id
        self._check, self._advance = check, advance
        self._manifest = read_manifest(dataset / manifest_path(job_id))
        self._own = file_entry(dataset, manifest_path(job_id))
        self._files = (*self._manifest.shards, *self._manifest.indexes, *self._manifest.extras)
        _refuse_strangers(self._manifest, job_id, self._files)
        self._number = {entry.path: n for n, entry in enumerate((*self._files, self._own), 1)}
        self._uploaded, self._committed = 0, 0
        self._additions: dict[str, CommitOperationAdd] = {}
        self._entry = JobEntry.of(self._manifest, (dataset / manifest_path(job_id)).read_bytes())
        self._entries: dict[str, JobEntry] = {}
        """What is known of the repository's jobs, by the sha256 and by the git name of their manifests."""
        self._tables_read: set[str] = set()

    def run(self) -> str:
        hub = self._hub
        hub.ensure()
        head = hub.head()
        # What cannot be merged is refused before a byte is sent.
        replaces = self._another_run(head)
        self._card_and_table(head)
        early, last = batches(self._files)
        if replaces:
            self._refuse_many(head)
            early, last = [], self._files
        for batch in early:
            hub.patience.retry(partial(self._commit_files, batch), long=True)
            self._tell(batch[-1], committed=True)
        hub.patience.retry(self._clear)
        oid = hub.patience.retry(partial(self._commit_last, last), long=True)
        self._tell(self._own, committed=True)
        self._read_back(oid)
        return oid

    def _commit_files(self, batch: Sequence[FileEntry]) -> None:
        self._another_run(BRANCH)  # another service may have published other rows meanwhile
        missing = self._missing(batch)
        if missing:
            additions = self._upload(missing)
            self._hub.commit(additions, f"Add files of {self._job_id}")

    def _clear(self) -> None:
        """Delete what a push of other files left that never landed, as no manifest of the job names it."""
        head = self._hub.head()
        if self._another_run(head):
            return  # the last commit replaces a whole run, so that there is no moment without one
        stale = self._stale(head)
        for start in range(0, len(stale), MAX_COMMIT_FILES):
            self._check()
            deletions = [CommitOperationDelete(path) for path in stale[start : start + MAX_COMMIT_FILES]]
            head = self._hub.commit(deletions, f"Remove stale files of {self._job_id}", parent=head)

    def _commit_last(self, batch: Sequence[FileEntry]) -> str:
        head = self._hub.head()
        self._another_run(head)
        described = self._card_and_table(head)
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        operations += self._upload(self._missing([*batch, self._own], head))
        operations += [CommitOperationDelete(path) for path in self._stale(head)]
        for path, content in described.items():
            if self._hub.read(path, head) != content:
                operations.append(CommitOperationAdd(path, content))
        if not operations:
            return head
        return self._hub.commit(operations, f"Add {self._job_id}", parent=head)

    def _another_run(self, revision: str) -> bool:
        """Say whether another run of the job's rows is published. Raises OptionRefused for other rows."""
        remote = self._hub.find([self._own.path], revision).get(self._own.path)
        if remote is None or self._is_same(remote, self._own):
            return False
        theirs = self._entry_of(remote, revision).provenance.identity
        ours = self._manifest.provenance.identity
        if theirs != ours:
            raise self._refused(f"of other rows: {', '.join(theirs.differences(ours))} changed")
        return True

    def _refuse_many(self, revision: str) -> None:
        """Refuse a replacement of several commits: between two of them, readers would find both runs."""
        num_files = len(self._missing(self._files, revision)) + len(self._stale(revision))
        if num_files > MAX_REPLACED_FILES:
            raise self._refused(
                f"of another run: {num_files} files are different, and one commit replaces at most "
                f"{MAX_REPLACED_FILES}"
            )

    def _refused(self, detail: str) -> OptionRefused:
        repo_id, job_id = self._hub.target.repo_id, self._job_id
        return OptionRefused(
            f"{repo_id} holds {job_id} already, {detail}",
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
            self._tell(some[-1])
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

    def _tell(self, last: FileEntry, *, committed: bool = False) -> None:
        """Say how far the push has got: every file up to `last` is uploaded, or even committed."""
        self._uploaded = max(self._uploaded, self._number[last.path])
        if committed:
            self._committed = self._number[last.path]
        self._advance(self._uploaded + self._committed)

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
