"""The Hub's client: how long it bears silence, and what its errors mean, which is said here and nowhere else.

What an error means follows from HTTP status and exception type, never from a text. No error holds the
client's exception: its request carries the token.
"""

import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.dataset.errors import NO_SPACE
from service.errors import DiskFull, HubUnavailable, QuarryError, RequestError

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

PASSING_STATUSES = frozenset({408, 409, 412, 425, 429})
"""Beside those from 500 on. With 412 the branch has moved since the parent of a commit was read."""
FULL_BELOW_BYTES = 2**24
"""A cache with less room than this is full: the next piece of a download does not fit."""
CONNECT_S = 30.0
SILENCE_S = 180.0
"""A commit may take the Hub a minute; a connection that is silent for longer is dead."""
LONGEST_WAIT_S = 3600.0
"""That an answer may ask for: the Hub counts commits by the hour."""
_FIRST_USE = threading.Lock()


class Passing(Exception):
    """The Hub gave no good answer, but may the next time.

    `retry_after_s` is what its answer asked for; `is_limit`: it was asked more often than it allows.
    """

    def __init__(self, detail: str, retry_after_s: float | None = None, *, is_limit: bool = False) -> None:
        """Keep the detail apart from the wait."""
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.is_limit = is_limit


@contextmanager
def calling_hub(what: str, refused: Callable[[str], QuarryError], field: str) -> Iterator[None]:
    """Translate the errors of the Hub's client while it is asked for `what`.

    Raises `refused` of a sentence where the Hub knows no such thing, denies it, or holds something that
    cannot be read; DiskFull where there is no room for it; Passing where the Hub did not answer, answered
    with a server error, or the transfer broke off. No sentence shows the token.
    """
    import httpx2
    from huggingface_hub import errors as hub

    with _FIRST_USE:
        _limit_silence()
    try:
        yield
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError, hub.RevisionResolutionError) as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        for answer in causes:
            if isinstance(answer, hub.HfHubHTTPError):
                raise _answered(what, answer, refused) from None
        # The last is said of a file that is not in the cache either.
        if isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError | hub.LocalEntryNotFoundError):
            # It names the type: the text may quote the request.
            kind = type(causes[-1]).__name__
            raise Passing(f"the Hub cannot be reached for {what}: {kind}") from None
        if isinstance(error, ValueError | FileNotFoundError | hub.RevisionResolutionError):
            # An id that is none, an unknown configuration or split, a repository without data.
            raise refused(f"{what} cannot be read: {_line(error)}") from None
        # A RuntimeError is the storage's client, whose transfer broke off. It says a full disk in its message
        # alone, so the disk is asked.
        if error.errno in NO_SPACE if isinstance(error, OSError) else _cache_is_full():
            cure = "free space where the Hugging Face cache is (HF_HOME), then resume the job"
            raise DiskFull(f"no space is left for what is read of {what}", field=field, cure=cure) from None
        # The system's own words would name paths of the host.
        why = error.strerror if isinstance(error, OSError) and error.strerror else _line(error)
        raise Passing(f"reading {what} broke off: {why}") from None


@contextmanager
def reading_hub(what: str, refused: type[RequestError], field: str, cure: str) -> Iterator[None]:
    """Do as `calling_hub` where nobody asks again: what may pass is HubUnavailable. Errors name the field."""
    try:
        with calling_hub(what, functools.partial(refused, field=field, cure=cure), field):
            yield
    except Passing as error:
        raise HubUnavailable(error.detail, field=field) from None


@functools.cache
def _limit_silence() -> None:
    """Have every call of the Hub's client give up a silent connection: most of them have no limit."""
    from huggingface_hub import get_session, set_client_factory

    hooks = get_session().event_hooks["request"]  # its own, which knows HF_HUB_OFFLINE
    set_client_factory(functools.partial(_limited_client, hooks))  # this closes the client that there was


def _limited_client(hooks: "list[Callable[..., Any]]") -> "httpx2.Client":
    import httpx2

    timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S, pool=None)

    def limit(request: httpx2.Request) -> None:
        # Calls that read a branch or list a tree name no limit, which overrides the client's.
        if request.extensions["timeout"]["read"] is None:
            request.extensions["timeout"] = timeout.as_dict()

    return httpx2.Client(event_hooks={"request": [*hooks, limit]}, follow_redirects=True, timeout=timeout)


def _answered(what: str, answer: "HfHubHTTPError", refused: Callable[[str], QuarryError]) -> Exception:
    """Return the error of an answer, with the Hub's own words, which may quote the request."""
    status, words = answer.response.status_code, (answer.server_message or "").replace("\n", " ")
    for response in (*answer.response.history, answer.response):
        if token := response.request.headers.get("Authorization", "").removeprefix("Bearer "):
            words = words.replace(token, "***")
    detail = f"the Hub answered {status} for {what}" + (f": {words[:500]}" if words else "")
    if status not in PASSING_STATUSES and status < 500:
        return refused(detail)
    return Passing(detail, _asked_wait_s(answer.response.headers), is_limit=status == 429)


def _asked_wait_s(headers: "httpx2.Headers") -> float | None:
    """Return the wait that an answer asks for: as the Hub's own limit says it, or any server in between."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit, asked = parse_ratelimit_headers(headers), headers.get("Retry-After", "").strip()
    if limit is not None and limit.remaining == 0:
        wait_s = float(limit.reset_in_seconds + 1)  # they are rounded
    elif asked.isdigit():
        wait_s = float(asked)
    else:
        return None
    return min(wait_s, LONGEST_WAIT_S)


def _cache_is_full() -> bool:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return shutil.disk_usage(there).free < FULL_BELOW_BYTES


def _line(error: Exception) -> str:
    """Return the first line of a message: the rest repeats URLs and request ids."""
    return str(error).strip().split("\n", 1)[0][:500] or type(error).__name__
