"""The Hub's client: its timeouts and the meaning of its errors, both defined only here.

The meaning of an error depends on HTTP status and exception type, never on a text. No error keeps the
client's exception, since its request has the token.
"""

import functools
import importlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.dataset.errors import NO_SPACE
from service.errors import DiskFull, HubUnavailable, QuarryError, RequestError
from service.retry_after import asked_wait_s

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

PASSING_STATUSES = frozenset({408, 409, 412, 425, 429})
"""Statuses worth retrying, besides those from 500 on. 412 means that the branch has moved since a commit's
parent was read.
"""
FULL_BELOW_BYTES = 2**24
"""A cache with less free space than this counts as full: the next chunk of a download does not fit."""
CONNECT_S = 30.0
SILENCE_S = 180.0
"""A commit may take the Hub a minute; a connection that is silent for longer is dead."""
LONGEST_WAIT_S = 3600.0
"""The longest wait that an answer may ask for: the Hub counts commits by the hour."""
_FIRST_USE = threading.Lock()


class Passing(Exception):
    """The call to the Hub failed, but may succeed when retried.

    `retry_after_s` is the wait that its answer asked for; `is_limit` means that a rate limit was hit.
    """

    def __init__(self, detail: str, retry_after_s: float | None = None, *, is_limit: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.is_limit = is_limit


@contextmanager
def calling_hub(what: str, refused: Callable[[str], QuarryError], field: str) -> Iterator[None]:
    """Translate the errors of the Hub's client in calls for `what`.

    Raises `refused(detail)` if the Hub does not have it, denies access, or has something that cannot be read;
    DiskFull if there is no room for it; Passing if the Hub did not answer, answered with a server error, or
    the transfer was interrupted. No detail shows the token.
    """
    from huggingface_hub import errors as hub

    with _FIRST_USE:
        http = _limit_silence()
    try:
        yield
    except (http.HTTPError, OSError, ValueError, RuntimeError, hub.RevisionResolutionError) as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        for answer in causes:
            if isinstance(answer, hub.HfHubHTTPError):
                raise _answered(what, answer, refused) from None
        # LocalEntryNotFoundError: the Hub did not answer and the file is not in the cache.
        if isinstance(error, http.HTTPError | ConnectionError | TimeoutError | hub.LocalEntryNotFoundError):
            # Only the type is named, since the text may quote the request.
            kind = type(causes[-1]).__name__
            raise Passing(f"the Hub cannot be reached for {what}: {kind}") from None
        if isinstance(error, ValueError | FileNotFoundError | hub.RevisionResolutionError):
            # An invalid id, an unknown configuration or split, a repository without data.
            raise refused(f"{what} cannot be read: {_line(error)}") from None
        # A RuntimeError is from the storage client (xet), whose transfer was interrupted. It reports a full
        # disk only in its message, so the disk is checked.
        if error.errno in NO_SPACE if isinstance(error, OSError) else _cache_is_full():
            cure = "free space where the Hugging Face cache is (HF_HOME), then resume the job"
            raise DiskFull(f"no space is left for what is read of {what}", field=field, cure=cure) from None
        # The OSError's full text would name paths of the host.
        why = error.strerror if isinstance(error, OSError) and error.strerror else _line(error)
        raise Passing(f"reading {what} broke off: {why}") from None


@contextmanager
def reading_hub(what: str, refused: type[RequestError], field: str, cure: str) -> Iterator[None]:
    """Like `calling_hub`, for calls without retry: Passing becomes HubUnavailable. Errors name the field."""
    try:
        with calling_hub(what, functools.partial(refused, field=field, cure=cure), field):
            yield
    except Passing as error:
        away = HubUnavailable(error.detail, field=field)
        away.wait_s = error.retry_after_s or 0.0
        raise away from None


@functools.cache
def _limit_silence() -> Any:  # noqa: ANN401 - one of two modules
    """Give every call of the Hub's client a timeout for silent connections: most calls have none.

    Return the HTTP library of that client, which is httpx before huggingface_hub 2.
    """
    from huggingface_hub import get_session, set_client_factory

    client = get_session()
    http = importlib.import_module(type(client).__module__.partition(".")[0])
    hooks = client.event_hooks["request"]  # its own hooks, which handle HF_HUB_OFFLINE
    set_client_factory(functools.partial(_limited_client, http, hooks))  # this closes the existing client
    return http


def _limited_client(http: Any, hooks: list[Callable[..., Any]]) -> "httpx2.Client":  # noqa: ANN401
    timeout = http.Timeout(SILENCE_S, connect=CONNECT_S, pool=None)

    def limit(request: "httpx2.Request") -> None:
        # Calls that read a branch or list a tree pass `timeout=None`, which overrides the client's.
        if request.extensions["timeout"]["read"] is None:
            request.extensions["timeout"] = timeout.as_dict()

    client: httpx2.Client = http.Client(
        event_hooks={"request": [*hooks, limit]}, follow_redirects=True, timeout=timeout
    )
    return client


def _answered(what: str, answer: "HfHubHTTPError", refused: Callable[[str], QuarryError]) -> Exception:
    """Return the error for an answer, with the Hub's own message, from which the token is removed."""
    status, words = answer.response.status_code, (answer.server_message or "").replace("\n", " ")
    for response in (*answer.response.history, answer.response):
        if token := response.request.headers.get("Authorization", "").removeprefix("Bearer "):
            words = words.replace(token, "***")
    detail = f"the Hub answered {status} for {what}" + (f": {words[:500]}" if words else "")
    if status not in PASSING_STATUSES and status < 500:
        return refused(detail)
    return Passing(detail, _asked_wait_s(answer.response.headers), is_limit=status == 429)


def _asked_wait_s(headers: "httpx2.Headers") -> float | None:
    """Return the wait that an answer asks for, through the Hub's rate limit headers or Retry-After."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        wait_s: float = min(limit.reset_in_seconds + 1.0, LONGEST_WAIT_S)  # seconds are rounded
        return wait_s
    return asked_wait_s(headers.get("Retry-After", ""), LONGEST_WAIT_S)


def _cache_is_full() -> bool:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return shutil.disk_usage(there).free < FULL_BELOW_BYTES


def _line(error: Exception) -> str:
    """Return the first line of a message: the rest repeats URLs and request ids."""
    return str(error).strip().split("\n", 1)[0][:500] or type(error).__name__
