"""Pushes one finished job from a dataset folder to its repository, so that a consumer never sees half of it.

Large files go ahead of the commits; then commits of up to 100 files, of which only the last holds the
manifest and the card. Before every commit, and so also after every error of one, the repository is read: what
is there already drops out, and a commit whose answer was lost is not made twice. Only the commit with the
card is guarded by a parent, because the card lists all jobs; the files of different jobs have different
paths. At the end everything is read back.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd
from pydantic import ValidationError

from schemas.manifest import FileEntry, Manifest
from schemas.names import (
    CARD_PATH,
    FINAL_NORM_PATH,
    MAX_COMMIT_FILES,
    is_job_id,
    manifest_path,
    token_freq_path,
)
from service.errors import DatasetBroken, HubUnavailable, OptionRefused
from service.publish.assemble import read_manifest
from service.publish.card import render_card, states_config
from service.publish.extras import file_entry
from service.publish.hub import BRANCH, Hub, RemoteFile

UPLOAD_GROUP_FILES = 8
"""Files between two looks at the lease."""

ONE_MODEL_CURE = "name another repository: one repository holds the states of one model"


def push_job(hub: Hub, dataset: Path, job_id: str, check: Callable[[], None] = lambda: None) -> str:
    """Push the job whose manifest stands in `dataset`; return a commit that holds it whole.

    Nothing is deleted, here or there. `check` is called between uploads and before commits; it may raise.

    Raises:
        HubDenied: the token may not write (`hub.repo_id`).
        HubUnavailable: patience is at its end, or what was pushed cannot be read back.
        OptionRefused: the repository holds another model (`hub.repo_id`), is public where a private one was
            asked for (`hub.private`), or has a configuration of other columns (`hub.config_name`).
        DatasetBroken: a local file is not what the manifest says.
    """
    return _Push(hub, dataset, job_id, check).run()


def batches(files: Sequence[FileEntry]) -> tuple[list[Sequence[FileEntry]], Sequence[FileEntry]]:
    """Split a job's files into full commits and the last, which has room for the manifest and the card."""
    split = max(0, len(files) - (MAX_COMMIT_FILES - 2))
    early = [
        files[start : start + MAX_COMMIT_FILES][: split - start]
        for start in range(0, split, MAX_COMMIT_FILES)
    ]
    return early, files[split:]


class _Push:
    def __init__(self, hub: Hub, dataset: Path, job_id: str, check: Callable[[], None]) -> None:
        self._hub, self._dataset, self._job_id, self._check = hub, dataset, job_id, check
        self._manifest = read_manifest(dataset / manifest_path(job_id))
        self._own = file_entry(dataset, manifest_path(job_id))
        self._files = (*self._manifest.shards, *self._manifest.indexes, *self._manifest.extras)
        _refuse_strangers(self._manifest, job_id, self._files)
        self._additions: dict[str, CommitOperationAdd] = {}
        self._read: dict[str, Manifest] = {}

    def run(self) -> str:
        hub = self._hub
        hub.ensure()
        self._card(hub.head())  # refuses what cannot be merged before a byte is sent
        early, last = batches(self._files)
        for batch in early:
            hub.patience.retry(partial(self._commit_files, batch))
        oid = hub.patience.retry(partial(self._commit_last, last))
        self._read_back(oid)
        return oid

    def _commit_files(self, batch: Sequence[FileEntry]) -> None:
        missing = self._missing(batch)
        if missing:
            additions = self._upload(missing)
            self._hub.commit(additions, f"Add files of {self._job_id}")

    def _commit_last(self, batch: Sequence[FileEntry]) -> str:
        head = self._hub.head()
        card = self._card(head)
        additions = self._upload(self._missing([*batch, self._own], head))
        if self._hub.read(CARD_PATH, head) != card:
            additions.append(CommitOperationAdd(CARD_PATH, card))
        if not additions:
            return head
        return self._hub.commit(additions, f"Add {self._job_id}", parent=head)

    def _card(self, revision: str) -> bytes:
        """Return the card of all jobs at `revision` and this one. Raises OptionRefused if they do not mix."""
        norm = next(entry for entry in self._manifest.extras if entry.path == FINAL_NORM_PATH)
        remote = self._hub.find([FINAL_NORM_PATH], revision).get(FINAL_NORM_PATH)
        if remote is not None and not self._is_same(remote, norm):
            detail = f"{self._hub.target.repo_id} holds the states of another model"
            raise OptionRefused(detail, field="hub.repo_id", cure=ONE_MODEL_CURE)
        existing = self._hub.read(CARD_PATH, revision)
        card = render_card(
            [*self._others(revision), self._manifest],
            {self._job_id: states_config(self._hub.target.config_name)},
            existing.decode() if existing is not None else None,
        )
        return card.encode()

    def _others(self, revision: str) -> list[Manifest]:
        """Return the manifests of the other jobs at `revision`."""
        found = []
        for remote in self._hub.files("manifests", revision):
            job_id = Path(remote.path).stem
            if not is_job_id(job_id) or job_id == self._job_id:
                continue
            if remote.git_oid not in self._read:
                self._read[remote.git_oid] = self._parsed(remote.path, self._hub.read(remote.path, revision))
            found.append(self._read[remote.git_oid])
        return found

    def _parsed(self, path: str, content: bytes | None) -> Manifest:
        try:
            return Manifest.model_validate_json(content or b"")
        except ValidationError:
            detail = f"{path} in {self._hub.target.repo_id} is not a manifest of this version"
            cure = "upgrade this service, or name another repository"
            raise OptionRefused(detail, field="hub.repo_id", cure=cure) from None

    def _missing(self, entries: Sequence[FileEntry], revision: str = BRANCH) -> list[FileEntry]:
        remote = self._hub.find([entry.path for entry in entries], revision)
        return [e for e in entries if e.path not in remote or not self._is_same(remote[e.path], e)]

    def _is_same(self, remote: RemoteFile, entry: FileEntry) -> bool:
        if remote.sha256 is not None:
            return (remote.sha256, remote.num_bytes) == (entry.sha256, entry.bytes)
        return remote.num_bytes == entry.bytes and remote.git_oid == _git_oid(self._local(entry).read_bytes())

    def _upload(self, entries: Sequence[FileEntry]) -> list[CommitOperationAdd]:
        """Return the operations of `entries`, uploaded and proven to be the manifest's bytes."""
        additions = []
        for start in range(0, len(entries), UPLOAD_GROUP_FILES):
            self._check()
            some = entries[start : start + UPLOAD_GROUP_FILES]
            group = [self._addition(entry) for entry in some]
            self._hub.upload(group)
            for entry, addition in zip(some, group, strict=True):
                # The client hashed the very bytes that it sent.
                if addition.upload_info.sha256.hex() != entry.sha256:
                    raise DatasetBroken(f"{entry.path} no longer has the bytes that were sealed")
            additions += group
        self._check()
        return additions

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
        """Compare all files at `oid` with the manifest: small ones are read, large ones by sha256."""
        entries = [*self._files, self._own]
        remote = self._hub.find([entry.path for entry in entries], oid)
        for entry in entries:
            found = remote.get(entry.path)
            if found is not None and found.sha256 is None:
                same = hashlib.sha256(self._hub.read(entry.path, oid) or b"").hexdigest() == entry.sha256
            else:
                same = found is not None and self._is_same(found, entry)
            if not same:
                where = f"{self._hub.target.repo_id} at {oid}"
                raise HubUnavailable(
                    f"{entry.path} was pushed, but {where} does not hold it as it was sealed"
                )


def _refuse_strangers(manifest: Manifest, job_id: str, files: Sequence[FileEntry]) -> None:
    """Refuse a manifest that names files which are not the job's: the folder may be anybody's."""
    if manifest.provenance.job_id != job_id:
        raise DatasetBroken(f"the manifest of {job_id} is that of {manifest.provenance.job_id}")
    folders = tuple(PurePosixPath(kind, job_id) for kind in ("data", "index"))
    if FINAL_NORM_PATH not in [entry.path for entry in files]:
        raise DatasetBroken(f"the manifest of {job_id} names no {FINAL_NORM_PATH}")
    single = {FINAL_NORM_PATH, token_freq_path(job_id)}
    for entry in files:
        if PurePosixPath(entry.path).parent not in folders and entry.path not in single:
            raise DatasetBroken(f"{entry.path} is no file of a dataset")


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
