"""Write access to one dataset repository on the Hub, through a handful of methods.

Each answers or raises one of two errors: `HubDenied` waits for a person, `Passing` may be tried again. If
a commit is gone, it is `HubUnavailable`: the whole push begins again. Who tries again:

    verb                        the client itself            ours
    check_right, ensure, head,  never                        here, bounded by `Patience`
    find, files, read, exists
    upload                      429 and 5xx, a few times     the caller, group by group of files
    commit                      never                        the caller, which first reads what arrived
"""

import functools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars

from schemas.request import HubTarget
from service.artifacts.dataset_files import SMALL_BYTES
from service.artifacts.hub_client import Passing, calling_hub
from service.errors import HubDenied, HubLimited, HubUnavailable, OptionRefused
from service.settings import Settings

Result = TypeVar("Result")

FIELD = "hub.repo_id"
BRANCH = "main"
PATHS_PER_CALL = 500
NO_WRITE_CURE = (
    "set QUARRY_HUB_TOKEN_FILE to a token that may write there, then resume or send it again; "
    "for another repository send a new job"
)


@dataclass(frozen=True, slots=True)
class Patience:
    """How calls to the Hub are retried: up to `attempts` within `deadline_s`, with growing jittered waits."""

    attempts: int = 8
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    deadline_s: float = 900.0
    sleep: Callable[[float], None] = time.sleep

    def retry(self, call: Callable[[], Result], *, long: bool = False) -> Result:
        """Return `call()`, retried while it raises `Passing`. Raises HubUnavailable or HubLimited in the end.

        For a `long` call only the waits count towards the deadline: an upload may run for longer than the
        deadline before its first error, and what it has sent is not sent again.
        """
        began_s, waited_s, failures = time.monotonic(), 0.0, 0
        while True:
            try:
                return call()
            except Passing as error:
                # The jitter grows, too: of many concurrent pushes one commits, and the others must retry at
                # different times.
                spread = random.uniform(1, 2)  # noqa: S311 - a wait, not a secret
                growing_s = min(self.first_wait_s * 2**failures * spread, self.longest_wait_s)
                wait_s = growing_s if error.retry_after_s is None else error.retry_after_s
                spent_s = waited_s if long else time.monotonic() - began_s
                failures += 1
                if failures >= self.attempts or spent_s + wait_s >= self.deadline_s:
                    cure = (
                        "ask again, or resume a blocked job, when the Hub answers; one in publishing goes on "
                        "alone; all is kept, and nothing is pushed twice"
                    )
                    detail = f"{error.detail} (asked again for as long as allowed)"
                    away = (HubLimited if error.is_limit else HubUnavailable)(detail, cure=cure)
                    away.wait_s = wait_s if error.is_limit else error.retry_after_s or 0.0
                    raise away from None
            waited_s += wait_s
            self.sleep(wait_s)


class Repository:
    """The repository `target.repo_id`, with the token and endpoint in force when it was created."""

    def __init__(self, target: HubTarget, settings: Settings, patience: Patience | None = None) -> None:
        """Make no call yet. Raises HubDenied without a token or if it may not be used for this repository."""
        settings.check_push(target.repo_id)
        token = settings.token()
        if token is None:
            cure = "set QUARRY_HUB_TOKEN_FILE to a file that holds a token with write access"
            detail = f"pushing to {target.repo_id} needs a Hub token, and none is set"
            raise HubDenied(detail, field=FIELD, cure=cure)
        disable_progress_bars()
        self.target, self.settings = target, settings
        self.patience = patience or Patience()
        self._api = HfApi(endpoint=settings.hub_endpoint, token=token, library_name="eagle-quarry")
        self._where: dict[str, Any] = {"repo_id": target.repo_id, "repo_type": "dataset"}

    def check_right(self) -> None:
        """Check that the token may write to or create the repository. Raises HubDenied, OptionRefused."""
        if self.exists():
            self._check_writable()
        else:
            self._check_namespace(self._ask("ask whose the token is", self._api.whoami))

    def ensure(self) -> None:
        """Create the repository if it is missing, and check that the token may write to it."""
        self._ask("create the repository", self._create_if_missing)
        self._check_writable()

    def exists(self) -> bool:
        """Return whether the repository exists and the token may read it."""
        return bool(self._ask("look for the repository", lambda: self._api.repo_exists(**self._where)))

    def head(self) -> str:
        """Return the head commit of the main branch."""
        return str(self._ask("read the branch", lambda: self._api.repo_info(**self._where)).sha)

    def find(self, paths: Sequence[str], revision: str) -> dict[str, RepoFile]:
        """Return those of `paths` that are files at `revision`; `blob_id` is git's SHA-1."""
        files: dict[str, RepoFile] = {}
        for start in range(0, len(paths), PATHS_PER_CALL):
            some = list(paths[start : start + PATHS_PER_CALL])
            call = functools.partial(self._api.get_paths_info, paths=some, revision=revision, **self._where)
            files |= _files(self._ask("read the tree", call))
        return files

    def files(self, folder: str, revision: str) -> list[RepoFile]:
        """Return the files directly in `folder` at `revision`; an empty list if there is no such folder."""

        def listing() -> list[Any]:
            try:
                return list(self._api.list_repo_tree(**self._where, path_in_repo=folder, revision=revision))
            except RemoteEntryNotFoundError:
                return []

        return list(_files(self._ask("list the tree", listing)).values())

    def read(self, path: str, revision: str, max_bytes: int = SMALL_BYTES) -> bytes | None:
        """Return a small file's content at `revision`, or None if it does not exist. Raises OptionRefused."""
        found = self.find([path], revision).get(path)
        if found is None:
            return None
        if found.size > max_bytes:
            cure = f"make it smaller than {max_bytes} bytes, or name another repository"
            detail = f"{path} in {self.target.repo_id} has {found.size} bytes"
            raise OptionRefused(detail, field=FIELD, cure=cure)

        def download() -> bytes | None:
            with tempfile.TemporaryDirectory(prefix="quarry-") as folder:
                try:
                    local = self._api.hf_hub_download(
                        **self._where, filename=path, revision=revision, local_dir=folder
                    )
                except RemoteEntryNotFoundError:
                    if path in self.find([path], revision):  # not removed meanwhile: a push would replace it
                        raise Passing(f"the Hub does not find {path}, which its tree has") from None
                    return None
                return Path(local).read_bytes()

        return self._ask(f"read {path}", download)

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Upload large files' content; what the Hub already has is not sent.

        Raises Passing, HubDenied, OptionRefused.
        """
        try:
            self._preupload("upload", additions)
        except Passing as error:
            # The xet client hides the status of a refused token behind a ConnectionError.
            self.check_right()
            raise error from None

    def commit(
        self,
        operations: Sequence[CommitOperationAdd | CommitOperationDelete],
        message: str,
        parent: str | None = None,
    ) -> str:
        """Commit uploaded files and deletions; return the commit's oid.

        With `parent`, only if that is still the branch's head. Raises Passing, HubDenied, OptionRefused: but
        for the last, the commit may exist anyway, so read the repository before retrying.
        """
        self._preupload("commit", [one for one in operations if isinstance(one, CommitOperationAdd)])
        with self._translated("commit"):
            done = self._api.create_commit(
                **self._where,
                operations=list(operations),
                commit_message=message,
                revision=BRANCH,
                parent_commit=parent,
            )
        return str(done.oid)

    def _preupload(self, doing: str, additions: Sequence[CommitOperationAdd]) -> None:
        """Upload large files' content. Raises OptionRefused for a file that the client would leave out."""
        with self._translated(doing):
            self._api.preupload_lfs_files(
                self.target.repo_id, additions, repo_type="dataset", revision=BRANCH, free_memory=False
            )
        # The client would leave these out of a commit, and only log it: a manifest would name missing files.
        if ignored := [one.path_in_repo for one in additions if one._should_ignore]:
            detail = f"{self.target.repo_id} has a .gitignore that leaves out {ignored[0]}"
            cure = "take the pattern out of .gitignore there, or name another repository"
            raise OptionRefused(detail, field=FIELD, cure=cure)

    def _ask(self, doing: str, call: Callable[[], Result]) -> Result:
        def once() -> Result:
            with self._translated(doing):
                return call()

        return self.patience.retry(once)

    def _create_if_missing(self) -> None:
        # Not `exist_ok`: after a conflict or a lost answer the next try checks whether it exists now.
        if not self._api.repo_exists(**self._where):
            self._api.create_repo(**self._where, private=self.target.private)

    def _check_writable(self) -> None:
        self._ask("check the right to write", lambda: self._api.auth_check(**self._where, write=True))
        info = self._ask("read the repository", lambda: self._api.repo_info(**self._where))
        if self.target.private and not info.private:
            cure = "set hub.private to false, or name another repository"
            raise OptionRefused(f"{self.target.repo_id} exists and is public", field="hub.private", cure=cure)

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        with calling_hub(f"{self.target.repo_id} ({doing})", self._denied, FIELD):
            try:
                yield
            except RevisionNotFoundError:
                # The branch or a commit that the Hub has just named: a person rewrote the history. To ask for
                # the same again is useless; whoever runs the caller again begins with the branch as it is.
                repo_id = self.target.repo_id
                detail = f"{repo_id} no longer has the branch or commit that it had just now ({doing})"
                raise HubUnavailable(detail, field=FIELD) from None
            except (ValueError, KeyError) as error:
                # The client raises these for an answer that it cannot parse.
                raise ConnectionError from error

    def _denied(self, detail: str) -> HubDenied:
        return HubDenied(detail, field=FIELD, cure=NO_WRITE_CURE)

    def _check_namespace(self, who: dict[str, Any]) -> None:
        repo_id, namespace = self.target.repo_id, self.target.repo_id.split("/")[0]
        access = who.get("auth", {}).get("accessToken", {})
        if access.get("role") == "read":
            raise self._denied(f"{repo_id}: the token may only read")
        if access.get("role") == "fineGrained":
            scopes = access.get("fineGrained", {}).get("scoped", [])
            here = [scope for scope in scopes if scope["entity"].get("name") == namespace]
            if not any("repo.write" in scope["permissions"] for scope in here):
                raise self._denied(f"{repo_id}: the fine-grained token may not write there")
            return
        roles = {org["name"]: org.get("roleInOrg") for org in who.get("orgs", [])} | {who["name"]: "admin"}
        if namespace not in roles or roles[namespace] == "read":
            raise self._denied(f"{repo_id}: the token of {who['name']} may not create repositories there")


def _files(entries: Sequence[Any]) -> dict[str, RepoFile]:
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
