"""One dataset repository on the Hub behind a handful of verbs; each answers or raises one of three errors.

`HubDenied` waits for a person, `Passing` may be tried again, `Stale` says that the branch moved under a
guarded commit. The class follows from HTTP status and exception type, never from a text. Who tries again:

    verb                        the client itself            ours
    check_right, ensure, head,  never                        here, bounded by `Patience`
    find, files, read
    upload                      429 and 5xx, a few times     the caller, group by group of files
    commit                      never                        the caller, which first reads what arrived

No error holds the client's exception: its request carries the token.
"""

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars
from tenacity import RetryCallState, Retrying, retry_if_exception_type
from tenacity.wait import wait_exponential_jitter

from schemas.request import HubTarget
from service.errors import HubDenied, HubUnavailable, OptionRefused
from service.plan.hub_reading import limit_silence
from service.publish.card import states_config
from service.settings import Settings

Result = TypeVar("Result")

FIELD = "hub.repo_id"
BRANCH = "main"
PATHS_PER_CALL = 500
PASSING_STATUSES = frozenset({408, 409, 425, 429})
NO_WRITE_CURE = (
    "set QUARRY_HUB_TOKEN_FILE to a token that may write there, then resume or send it again; "
    "for another repository send a new job"
)


class Passing(Exception):
    """The Hub did not answer rightly, but may the next time. `retry_after_s` is what its answer asked for."""

    def __init__(self, detail: str, retry_after_s: float | None = None) -> None:
        """Keep the detail apart from the wait."""
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s


class Stale(Passing):
    """The branch has moved since the parent of a guarded commit was read."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the Hub is asked again: `attempts` calls in `deadline_s`, with growing waits and jitter."""

    attempts: int = 8
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    deadline_s: float = 900.0
    sleep: Callable[[float], None] = time.sleep

    def retry(self, call: Callable[[], Result], *, long: bool = False) -> Result:
        """Return `call()`, called again while it raises `Passing`. Raises HubUnavailable at the end.

        Of a `long` call only the waits count, beside the number of tries: an upload may go well for longer
        than the deadline before it meets its first error, and what it sent is not sent again.
        """
        growing = wait_exponential_jitter(
            multiplier=self.first_wait_s, max=self.longest_wait_s, jitter=self.first_wait_s
        )

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.retry_after_s if isinstance(error, Passing) else None
            return growing(state) if asked is None else asked

        def over(state: RetryCallState) -> bool:
            spent_s = state.idle_for if long else state.seconds_since_start or 0.0
            return state.attempt_number >= self.attempts or spent_s + state.upcoming_sleep >= self.deadline_s

        retrying = Retrying(
            retry=retry_if_exception_type(Passing),
            stop=over,
            wait=wait,
            sleep=self.sleep,
            reraise=True,
        )
        try:
            return retrying(call)
        except Passing as error:
            cure = (
                "ask again, or resume a blocked job, when the Hub answers; one in publishing goes on alone; "
                "all is kept, and nothing is pushed twice"
            )
            raise HubUnavailable(f"{error.detail} (asked again for as long as allowed)", cure=cure) from None


class Hub:
    """The repository `target.repo_id`, seen with one token."""

    def __init__(
        self, target: HubTarget, *, endpoint: str | None, token: str | None, patience: Patience | None = None
    ) -> None:
        """Make no call yet. Raises HubDenied without a token."""
        if token is None:
            cure = "set QUARRY_HUB_TOKEN_FILE to a file that holds a token with write access"
            raise HubDenied(
                f"pushing to {target.repo_id} needs a Hub token, and none is set", field=FIELD, cure=cure
            )
        limit_silence()
        disable_progress_bars()
        self.target = target
        self.patience = patience or Patience()
        self._api = HfApi(endpoint=endpoint, token=token, library_name="eagle-quarry")
        self._secret = token
        self._where: dict[str, Any] = {"repo_id": target.repo_id, "repo_type": "dataset"}

    def check_right(self) -> None:
        """Return if the token may write here or create the repository. Raises HubDenied, OptionRefused."""
        if self._exists():
            self._check_writable()
        else:
            self._check_namespace(self._ask("ask whose the token is", self._api.whoami))

    def ensure(self) -> None:
        """Return when the repository exists and the token may write to it; create it when it is missing."""
        self._ask("create the repository", self._create_if_missing)
        self._check_writable()

    def head(self) -> str:
        """Return the commit that the main branch stands at."""
        return str(self._ask("read the branch", lambda: self._api.repo_info(**self._where)).sha)

    def find(self, paths: Sequence[str], revision: str = BRANCH) -> dict[str, RepoFile]:
        """Return those of `paths` that are files at `revision`; `blob_id` is a SHA-1 of git's."""
        files: dict[str, RepoFile] = {}
        for start in range(0, len(paths), PATHS_PER_CALL):
            some = list(paths[start : start + PATHS_PER_CALL])
            call = functools.partial(self._api.get_paths_info, paths=some, revision=revision, **self._where)
            files |= _files(self._ask("read the tree", call))
        return files

    def files(self, folder: str, revision: str = BRANCH) -> list[RepoFile]:
        """Return the files directly in `folder` at `revision`, in name order; none without such a folder."""

        def listing() -> list[Any]:
            try:
                return list(self._api.list_repo_tree(**self._where, path_in_repo=folder, revision=revision))
            except RemoteEntryNotFoundError:
                return []

        files = _files(self._ask("list the tree", listing))
        return [files[path] for path in sorted(files)]

    def read(self, path: str, revision: str = BRANCH) -> bytes | None:
        """Return a small file's bytes at `revision`, or None when there is none."""

        def download() -> bytes | None:
            with tempfile.TemporaryDirectory(prefix="quarry-") as folder:
                try:
                    local = self._api.hf_hub_download(
                        **self._where, filename=path, revision=revision, local_dir=folder
                    )
                except RemoteEntryNotFoundError:
                    return None
                return Path(local).read_bytes()

        return self._ask(f"read {path}", download)

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Upload the large ones' bytes; what the Hub has is not sent again. Raises Passing, HubDenied."""
        try:
            with self._translated("upload"):
                self._api.preupload_lfs_files(
                    self.target.repo_id, additions, repo_type="dataset", revision=BRANCH, free_memory=False
                )
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
        """Commit uploaded files and deletions; return the oid.

        Raises Passing, Stale (only with `parent`), HubDenied.

        After any error the commit may stand all the same: read before sending it again.
        """
        with self._translated("commit"):
            done = self._api.create_commit(
                **self._where,
                operations=list(operations),
                commit_message=message,
                revision=BRANCH,
                parent_commit=parent,
            )
        return str(done.oid)

    def _ask(self, doing: str, call: Callable[[], Result]) -> Result:
        def once() -> Result:
            with self._translated(doing):
                return call()

        return self.patience.retry(once)

    def _exists(self) -> bool:
        return bool(self._ask("look for the repository", lambda: self._api.repo_exists(**self._where)))

    def _create_if_missing(self) -> None:
        # Not `exist_ok`: after a conflict or a lost answer the next try looks whether it exists now.
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
        # The client raises ValueError or KeyError of an answer it cannot read, RuntimeError of a failed LFS
        # upload, its xet half bare OSErrors; files are checked before, so none of these is about the disk.
        try:
            yield
        except (httpx2.HTTPError, OSError, ValueError, KeyError, RuntimeError) as error:
            self._raise(doing, error)

    def _raise(self, doing: str, error: BaseException) -> NoReturn:
        answer = _answer(error)
        what = f"could not {doing} in {self.target.repo_id}"
        if answer is None:
            raise Passing(f"{what}: {type(_root(error)).__name__}") from None
        status, message = answer.response.status_code, self._redacted(answer.server_message or "")
        what = f"{what}: HTTP {status}{': ' + message if message else ''}"
        if status == 412:
            raise Stale(what) from None
        if status in PASSING_STATUSES or status >= 500:
            raise Passing(what, _retry_after_s(answer)) from None
        raise self._denied(what) from None

    def _denied(self, detail: str) -> HubDenied:
        return HubDenied(f"{self.target.repo_id}: {detail}", field=FIELD, cure=NO_WRITE_CURE)

    def _redacted(self, text: str) -> str:
        return text.replace(self._secret, "***").replace("\n", " ")[:500]

    def _check_namespace(self, who: dict[str, Any]) -> None:
        namespace = self.target.repo_id.split("/")[0]
        access = who.get("auth", {}).get("accessToken", {})
        if access.get("role") == "read":
            raise self._denied("the token may only read")
        if access.get("role") == "fineGrained":
            scopes = access.get("fineGrained", {}).get("scoped", [])
            here = [scope for scope in scopes if scope["entity"].get("name") == namespace]
            if not any("repo.write" in scope["permissions"] for scope in here):
                raise self._denied(f"the fine-grained token has no write permission on {namespace}")
            return
        roles = {org["name"]: org.get("roleInOrg") for org in who.get("orgs", [])} | {who["name"]: "admin"}
        if namespace not in roles or roles[namespace] == "read":
            raise self._denied(f"the token of {who['name']} may not create repositories under {namespace}")


def open_hub(target: HubTarget, settings: Settings, patience: Patience | None = None) -> Hub:
    """Return the repository with the token and endpoint now in force.

    Raises HubDenied without a token, or where it is not used for this repository.
    """
    namespace = target.repo_id.split("/")[0]
    if not settings.uses_token_in(namespace):
        cure = "use a key with this namespace, or another repository"
        raise HubDenied(f"nothing may be pushed to {namespace}", field=FIELD, cure=cure)
    return Hub(target, endpoint=settings.hub_endpoint, token=settings.token(), patience=patience)


def check_target(hub: HubTarget, settings: Settings, patience: Patience | None = None) -> None:
    """Return if the token may write to `hub`, or may create it. A client waits, so patience is short.

    Raises HubDenied (`hub.repo_id`), OptionRefused (`hub.private`, `hub.config_name`), HubUnavailable.
    """
    states_config(hub.config_name)
    short = Patience(attempts=3, longest_wait_s=3.0, deadline_s=15.0)
    open_hub(hub, settings, patience or short).check_right()


def _files(entries: Sequence[Any]) -> dict[str, RepoFile]:
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _answer(error: BaseException | None) -> HfHubHTTPError | None:
    """Return the Hub's answer that `error` was raised from, if there was one."""
    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return error


def _retry_after_s(answer: HfHubHTTPError) -> float | None:
    asked = answer.response.headers.get("Retry-After", "").strip()
    return float(asked) if asked.isdigit() else None
