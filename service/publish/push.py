"""Pushes one finished job from a dataset folder to its repository, so that consumers never see a partial job.

Large files are uploaded first; then commits of up to 100 files are made, of which only the last has the
manifest, the card and the table of jobs. The repository is read before every commit, and so also after a
failed one: files already there are skipped, and a commit whose answer was lost is not made twice. Every
commit names its parent, at which no other run of the job is published: the card lists all jobs, and two runs
of a job use the same paths. At the end everything is read back.

Published files are never replaced: a repository that holds another run of the job is refused. Files left by a
run that was never published, and so in no manifest, are deleted in the last commit, since they would match
the card's globs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from schemas.dataset.entries import FileEntry
from schemas.dataset.jobs_table import JobEntry
from schemas.names import FINAL_NORM_PATH, MAX_COMMIT_FILES, job_folders, manifest_path
from schemas.request import HubTarget
from service.artifacts.folder_limit import check_folder
from service.artifacts.repository import BRANCH, Patience, Repository
from service.publish.assemble import intact_manifest
from service.publish.card import states_config
from service.publish.others import OtherJobs
from service.publish.upload import Uploads
from service.settings import Settings

OWN_FILES = 3
"""Further files in the last commit: the manifest, the card and the table of jobs."""


def check_target(hub: HubTarget, settings: Settings, patience: Patience | None = None) -> None:
    """Return only if the token may write to or create `hub`. A client is waiting, so patience is short.

    Raises HubDenied (`hub.repo_id`), OptionRefused (`hub.private`, `hub.config_name`), HubUnavailable.
    """
    states_config(hub.config_name)
    short = Patience(attempts=3, longest_wait_s=3.0, deadline_s=15.0)
    Repository(hub, settings, patience or short).check_right()


def early_batches(files: Sequence[FileEntry]) -> list[Sequence[FileEntry]]:
    """Return the files of every commit but the last; the rest and `OWN_FILES` fit in the last one."""
    split = max(0, len(files) - (MAX_COMMIT_FILES - OWN_FILES))
    return [
        files[start : min(start + MAX_COMMIT_FILES, split)] for start in range(0, split, MAX_COMMIT_FILES)
    ]


class JobPush:
    """A push of the job whose manifest is in `dataset`. It is run once.

    Local files are never deleted. In the repository, Parquet files in this job's folders that its manifest
    does not list are deleted. `check` is called between uploads and before commits, `advance` after each
    commit but the last; both may raise.
    """

    def __init__(
        self,
        hub: Repository,
        dataset: Path,
        job_id: str,
        check: Callable[[], None] = lambda: None,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the manifest.

        Raises DatasetBroken if it is not this job's, or contradicts itself; OptionRefused if it has more
        shards than a repository takes.
        """
        self._hub, self._job_id, self._check, self._advance = hub, job_id, check, advance
        self._manifest = intact_manifest(dataset / manifest_path(job_id))
        self._files = self._manifest.entries
        check_folder(len(self._manifest.shards))
        self._entry = JobEntry.of(self._manifest, (dataset / manifest_path(job_id)).read_bytes())
        self._own = self._entry.manifest
        self._norm = next(entry for entry in self._files if entry.path == FINAL_NORM_PATH)
        self._uploads = Uploads(hub, dataset, check)
        self._others = OtherJobs(hub, self._uploads, job_id)

    def run(self) -> str:
        """Push the job; return a commit that holds all of it.

        Raises:
            HubDenied: the token may not write (`hub.repo_id`).
            HubUnavailable: patience is exhausted, or what was pushed cannot be read back.
            OptionRefused: the repository holds another model or another run of this job (`hub.repo_id`), is
                public although a private one was requested (`hub.private`), or has jobs that do not mix with
                this one (`hub.config_name`, `labels`).
            DatasetBroken: a local file is not what the manifest says.
        """
        hub = self._hub
        hub.ensure()
        head = hub.head()
        # A job that cannot be merged is refused before a byte is sent.
        self._refuse_another_run(head)
        self._others.merged(self._entry, self._norm, head)
        for batch in early_batches(self._files):
            hub.patience.retry(partial(self._commit_files, batch), long=True)
        oid = hub.patience.retry(self._commit_last, long=True)
        self._uploads.read_back([*self._files, self._own], oid)
        return oid

    def _commit_files(self, batch: Sequence[FileEntry]) -> None:
        self._refuse_another_run(BRANCH)  # another service may have published it meanwhile
        if missing := self._uploads.missing(batch):
            self._uploads.commit(missing, f"Add files of {self._job_id}", self._refuse_another_run)
            self._advance()

    def _commit_last(self) -> str:
        head = self._hub.head()
        self._refuse_another_run(head)
        merged = self._others.merged(self._entry, self._norm, head)
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        # Check all files again: another unpublished run may have overwritten earlier ones.
        operations += self._uploads.send(self._uploads.missing([*self._files, self._own], head))
        operations += [CommitOperationDelete(path) for path in self._stale(head)]
        for path, content in merged.items():
            if self._hub.read(path, head) != content:
                operations.append(CommitOperationAdd(path, content))
        if not operations:
            return head
        self._check()  # after reading the head, as in `Uploads.commit`
        return self._hub.commit(operations, f"Add {self._job_id}", parent=head)

    def _refuse_another_run(self, revision: str) -> None:
        self._others.refuse_another_run(self._manifest.shards, revision, self._own)

    def _stale(self, revision: str) -> list[str]:
        """Return the Parquet files at `revision` that the job's globs in the card match by mistake."""
        named = {entry.path for entry in self._files}
        paths = [
            file.path for folder in job_folders(self._job_id) for file in self._hub.files(folder, revision)
        ]
        return [path for path in paths if path.endswith(".parquet") and path not in named]
