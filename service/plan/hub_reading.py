"""What the Hub says when something is read -> the service's errors: refused for good, or not available."""

import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.dataset.errors import NO_SPACE
from service.errors import DiskFull, HubUnavailable, RequestError

if TYPE_CHECKING:
    import httpx2

REFUSED_STATUS = frozenset({400, 401, 403, 404, 410, 416})
FULL_BELOW_BYTES = 2**24
"""A cache with less room than this is full: the next piece of a download does not fit."""
CONNECT_S = 30.0
SILENCE_S = 180.0
"""A commit may take the Hub a minute; a connection that is silent for longer is dead."""


_FIRST_USE = threading.Lock()


def limit_silence() -> None:
    """Have every call of the Hub's client give up a silent connection: most of them have no limit."""
    with _FIRST_USE:
        _limit_once()


@functools.cache
def _limit_once() -> None:
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


@contextmanager
def reading_hub(what: str, refused: type[RequestError], field: str, cure: str) -> Iterator[None]:
    """Translate the errors of the Hub's client while `what` is read or downloaded.

    Raises `refused` naming `field` and `cure` where the Hub knows no such thing, denies it, or holds
    something that cannot be read; DiskFull where the client's cache has no room for it; HubUnavailable where
    the Hub did not answer, answered with a server error, or the reading broke off.
    """
    import httpx2
    from huggingface_hub import errors as hub

    limit_silence()
    try:
        yield
    except (hub.HfHubHTTPError, hub.LocalEntryNotFoundError) as error:
        # The second is said of a file that is not in the cache either, whatever the Hub answered: its cause
        # tells a refusal from silence.
        answered = error if isinstance(error, hub.HfHubHTTPError) else error.__cause__
        if not isinstance(answered, hub.HfHubHTTPError):
            raise _unreached(what, error, field) from error
        status = answered.response.status_code
        detail = f"the Hub answered {status} for {what}: {_line(answered)}"
        if status in REFUSED_STATUS:
            raise refused(detail, field=field, cure=cure) from error
        raise HubUnavailable(detail, field=field) from error
    except (httpx2.HTTPError, ConnectionError, TimeoutError) as error:
        raise _unreached(what, error, field) from error
    except (ValueError, FileNotFoundError, hub.RevisionResolutionError) as error:
        # An id that is none, an unknown configuration or split, a repository without data.
        raise refused(f"{what} cannot be read: {_line(error)}", field=field, cure=cure) from error
    except (OSError, RuntimeError) as error:
        # A RuntimeError is the storage's client, whose transfer broke off. It says a full disk in its message
        # alone, so the disk is asked.
        full = error.errno in NO_SPACE if isinstance(error, OSError) else _cache_is_full()
        if full:
            cure = "free space where the Hugging Face cache is (HF_HOME), then resume the job"
            raise DiskFull(f"no space is left for what is read of {what}", field=field, cure=cure) from error
        # The system's own words would name paths of the host.
        why = error.strerror if isinstance(error, OSError) and error.strerror else _line(error)
        raise HubUnavailable(f"reading {what} broke off: {why}", field=field) from error


def _cache_is_full() -> bool:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return shutil.disk_usage(there).free < FULL_BELOW_BYTES


def _unreached(what: str, error: Exception, field: str) -> HubUnavailable:
    """Return the error of a call without an answer. It names the type: the text may quote the request."""
    root = error.__cause__ or error
    return HubUnavailable(f"the Hub cannot be reached for {what}: {type(root).__name__}", field=field)


def _line(error: Exception) -> str:
    """Return the first line of a message: the rest repeats URLs and request ids."""
    return str(error).strip().split("\n", 1)[0][:500] or type(error).__name__
