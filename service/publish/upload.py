"""Sends files of a dataset folder to a repository, without resending what is already there."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import CommitOperationAdd
from huggingface_hub.hf_api import RepoFile

from schemas.dataset.entries import FileEntry
from schemas.dataset.jobs_table import git_oid
from service.artifacts.repository import BRANCH, Repository
from service.errors import DatasetBroken, HubUnavailable
from service.work.meters import UPLOADED

GROUP_FILES = 8
"""How many files are sent between two checks of the lease, and at most retried after an upload error."""


class Uploads:
    """Uploads files of `dataset` to `hub`. `check` is called between groups of files, and may raise.

    `elsewhere` maps the paths of files that are not in `dataset` yet to where they are.
    """

    def __init__(
        self,
        hub: Repository,
        dataset: Path,
        check: Callable[[], None],
        elsewhere: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self._hub, self._dataset, self._check, self._elsewhere = hub, dataset, check, elsewhere
        self._additions: dict[str, CommitOperationAdd] = {}

    def missing(self, entries: Sequence[FileEntry], revision: str = BRANCH) -> list[FileEntry]:
        """Return the files that are missing at `revision`, or have other bytes there."""
        remote = self._hub.find([entry.path for entry in entries], revision)
        return [e for e in entries if e.path not in remote or not self.is_same(remote[e.path], e)]

    def is_same(self, remote: RepoFile, entry: FileEntry) -> bool:
        """Return whether a file of the repository has an entry's bytes."""
        if remote.lfs is not None:
            return bool((remote.lfs.sha256, remote.size) == (entry.sha256, entry.bytes))
        same_size: bool = remote.size == entry.bytes
        return same_size and remote.blob_id == git_oid(self._local(entry).read_bytes())

    def send(self, entries: Sequence[FileEntry]) -> list[CommitOperationAdd]:
        """Upload `entries`, check that the sealed bytes were sent, and return their commit operations.

        Raises DatasetBroken, HubDenied, HubUnavailable.
        """
        additions: list[CommitOperationAdd] = []
        for start in range(0, len(entries), GROUP_FILES):
            some = entries[start : start + GROUP_FILES]
            # Each group has its own retries: the files of one commit may take hours, with an error in every
            # group.
            additions += self._hub.patience.retry(partial(self._send_group, some), long=True)
        return additions

    def commit(self, entries: Sequence[FileEntry], message: str, look: Callable[[str], None]) -> None:
        """Send the files and commit them onto a head that `look` does not refuse.

        Raises as `send`, `look` and `Repository.commit` do.
        """
        additions = self.send(entries)
        head = self._hub.head()  # another run may have been published during the upload
        look(head)
        # After reading the head: a later owner of the lease commits on this head or a later one, so a commit
        # of ours that arrives after theirs no longer matches the branch.
        self._check()
        self._hub.commit(additions, message, parent=head)
        self._additions.clear()  # the client commits each operation only once

    def read_back(self, entries: Sequence[FileEntry], revision: str = BRANCH) -> set[str]:
        """Compare files at `revision` with the sealed ones: small files by git hash, large (LFS) by sha256.

        Return the paths of the large ones. Raises HubUnavailable.
        """
        remote = self._hub.find([entry.path for entry in entries], revision)
        for entry in entries:
            if entry.path not in remote or not self.is_same(remote[entry.path], entry):
                where = f"{self._hub.target.repo_id} at {revision}"
                raise HubUnavailable(
                    f"{entry.path} was pushed, but {where} does not hold it as it was sealed"
                )
        return {path for path, file in remote.items() if file.lfs is not None}

    def _send_group(self, entries: Sequence[FileEntry]) -> list[CommitOperationAdd]:
        self._check()
        group = [self._addition(entry) for entry in entries]
        self._hub.upload(group)
        for entry, addition in zip(entries, group, strict=True):
            # The client hashed exactly the bytes that it sent.
            if addition.upload_info.sha256.hex() != entry.sha256:
                raise DatasetBroken(f"{entry.path} no longer has the bytes that were sealed")
        UPLOADED.add(bytes=sum(entry.bytes for entry in entries))
        return group

    def _addition(self, entry: FileEntry) -> CommitOperationAdd:
        """Return the operation of a file: one per push, so that an uploaded file is not uploaded again."""
        if entry.path not in self._additions:
            self._additions[entry.path] = CommitOperationAdd(entry.path, self._local(entry))
        return self._additions[entry.path]

    def _local(self, entry: FileEntry) -> Path:
        path = self._elsewhere.get(entry.path, self._dataset / entry.path)
        if not path.is_file() or path.stat().st_size != entry.bytes:
            raise DatasetBroken(f"{entry.path} is missing, or no longer {entry.bytes} bytes long")
        return path
