"""What the Hub says when something is read -> the service's errors: refused for good, or not available."""

from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import HubUnavailable, RequestError

REFUSED_STATUS = frozenset({400, 401, 403, 404, 410, 416})


@contextmanager
def reading_hub(what: str, refused: type[RequestError], field: str, cure: str) -> Iterator[None]:
    """Translate the errors of the Hub's libraries while `what` is read.

    Raises `refused` naming `field` and `cure` where the Hub knows no such thing, denies it, or holds
    something that the libraries cannot read; HubUnavailable where it did not answer, or answered with a
    server error.
    """
    import httpx2
    import pyarrow as pa
    from huggingface_hub import errors as hub

    try:
        yield
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        detail = f"the Hub answered {status} for {what}: {_line(error)}"
        if status in REFUSED_STATUS:
            raise refused(detail, field=field, cure=cure) from error
        raise HubUnavailable(detail, field=field) from error
    except (hub.LocalEntryNotFoundError, httpx2.HTTPError, ConnectionError, TimeoutError) as error:
        raise HubUnavailable(f"the Hub cannot be reached for {what}: {_line(error)}", field=field) from error
    except (
        ValueError,
        RuntimeError,
        FileNotFoundError,
        pa.ArrowException,
        hub.RevisionResolutionError,
    ) as error:
        # An id that is none, an unknown configuration or split, a repository without data, a broken file.
        raise refused(f"{what} cannot be read: {_line(error)}", field=field, cure=cure) from error


def _line(error: Exception) -> str:
    """Return the first line of a message: the rest repeats URLs and request ids."""
    return str(error).strip().split("\n", 1)[0][:500] or type(error).__name__
