"""The two clients: both send the same calls in the same order; one blocks and the other awaits."""

import asyncio
import logging
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar
from uuid import uuid4

import httpx2
from pydantic import ValidationError

from schemas.dataset.seal import sealing
from schemas.job import RESTING_JOB_STATES, JobSummary, Problem
from service.client.problem import ProblemReceived, refused, unreachable, unreadable
from service.client.routes import TIMEOUT_S, Call, FilePart, Pages, Routes
from service.errors import KeyRefused, OptionRefused

DEFAULT_SERVER = "http://127.0.0.1:8642"
KEPT_S = 3.0
"""How long an idle connection is reused; the service closes it after five seconds."""
POLL_S = 1.0
PATIENCE_S = 600.0
"""How long a service that is followed may be away: one that is replaced drains first, which takes minutes."""
PIECE_BYTES = 2**24

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class Quarry(Routes):
    """A client for blocking code. Several threads may use it at once."""

    def __init__(self, server: str | None = None, key: str | None = None) -> None:
        """Prepare for the service at base URL `server`; connects at the first call.

        `server` defaults to QUARRY_SERVER, else to this machine. `key` defaults to QUARRY_KEY, else to the
        content of the file QUARRY_KEY_FILE. SSL_CERT_FILE is trusted; proxy settings are ignored.

        Raises ProblemReceived: `server` is no URL, or the key cannot be read or sent.
        """
        self._http = httpx2.Client(**_options(server, key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(self, call: Call[Answer]) -> Answer:
        """Send one call and return its answer. Raises ProblemReceived."""
        try:
            response = self._http.request(call.method, call.path, **call.options)
        except (httpx2.RequestError, httpx2.InvalidURL, UnicodeError) as error:
            raise unreachable(str(self._http.base_url), error) from error
        return _read(call, response)

    def items(self, pages: Pages[Item]) -> Iterator[Item]:
        """Yield every item of all pages. Raises ProblemReceived, for one that is unreadable at the end."""
        call: Call[Any] | None = pages.first
        unreadable: list[Problem] = []
        while call is not None:
            page = self.send(call)
            unreadable += pages.unreadable(page)
            items, call = pages.turned(call, page)
            yield from items
        if unreadable:
            raise ProblemReceived(unreadable[0])

    def follow(self, job_id: str) -> Iterator[JobSummary]:
        """Yield a job every second until it ends, is blocked or paused; waits while the service restarts.

        Raises ProblemReceived: there is no such job, or no answer at the first call, or later for 10 minutes.
        """
        patience = _Patience()
        while True:
            try:
                job = self.job(job_id)
            except ProblemReceived as error:
                patience.unanswered(error)
            else:
                yield job
                if patience.rests(job):
                    return
            time.sleep(POLL_S)

    def download(self, job_id: str, path: str, to: Path) -> None:
        """Download the dataset's file `path` to `to`, which is replaced once the download is complete.

        Raises ProblemReceived, OSError.
        """
        with sealing(to, uuid4().hex) as new, new.open("wb") as file:
            more = True
            while more:
                part = self.file(job_id, path, offset=file.tell(), num_bytes=PIECE_BYTES)
                more = _appended(file, part)


class AsyncQuarry(Routes):
    """A client for code that awaits, with the methods of `Quarry`."""

    def __init__(self, server: str | None = None, key: str | None = None) -> None:
        """Prepare as `Quarry` does."""
        self._http = httpx2.AsyncClient(**_options(server, key))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(self, call: Call[Answer]) -> Answer:
        """Send one call and return its answer. Raises ProblemReceived."""
        try:
            response = await self._http.request(call.method, call.path, **call.options)
        except (httpx2.RequestError, httpx2.InvalidURL, UnicodeError) as error:
            raise unreachable(str(self._http.base_url), error) from error
        return _read(call, response)

    async def items(self, pages: Pages[Item]) -> AsyncIterator[Item]:
        """Yield every item of all pages. Raises ProblemReceived, for one that is unreadable at the end."""
        call: Call[Any] | None = pages.first
        unreadable: list[Problem] = []
        while call is not None:
            page = await self.send(call)
            unreadable += pages.unreadable(page)
            items, call = pages.turned(call, page)
            for item in items:
                yield item
        if unreadable:
            raise ProblemReceived(unreadable[0])

    async def follow(self, job_id: str) -> AsyncIterator[JobSummary]:
        """Yield a job every second, as `Quarry.follow` does."""
        patience = _Patience()
        while True:
            try:
                job = await self.job(job_id)
            except ProblemReceived as error:
                patience.unanswered(error)
            else:
                yield job
                if patience.rests(job):
                    return
            await asyncio.sleep(POLL_S)

    async def download(self, job_id: str, path: str, to: Path) -> None:
        """Download a file of the dataset to `to`, as `Quarry.download` does."""
        with sealing(to, uuid4().hex) as new, new.open("wb") as file:
            more = True
            while more:
                part = await self.file(job_id, path, offset=file.tell(), num_bytes=PIECE_BYTES)
                more = await asyncio.to_thread(_appended, file, part)


class _Patience:
    """Limits for how long a followed service may fail to answer; the first call must be answered."""

    def __init__(self) -> None:
        self._answered_s: float | None = None
        self._is_said = False

    def unanswered(self, error: ProblemReceived) -> None:
        since_s = self._answered_s
        if not error.is_passing or since_s is None or time.monotonic() - since_s > PATIENCE_S:
            raise error
        if not self._is_said:
            logger.warning("%s: %s; waiting", error.problem.title, error.problem.detail)
            self._is_said = True

    def rests(self, job: JobSummary) -> bool:
        self._answered_s, self._is_said = time.monotonic(), False
        return job.state in RESTING_JOB_STATES


def _base_url(server: str | None) -> httpx2.URL:
    """Return the service's base URL. Raises ProblemReceived."""
    server = server or os.environ.get("QUARRY_SERVER") or DEFAULT_SERVER
    with suppress(httpx2.InvalidURL):
        url = httpx2.URL(server)
        if url.scheme in ("http", "https") and url.host:
            return url
    cure = f"give one such as {DEFAULT_SERVER}"
    refused = OptionRefused(f"{server!r} is not the URL of a service", field="--server", cure=cure)
    raise ProblemReceived(refused.problem())


def _options(server: str | None, key: str | None) -> dict[str, Any]:
    """Return the arguments of an HTTP client. Raises ProblemReceived."""
    if key is None:
        key, file = os.environ.get("QUARRY_KEY", ""), os.environ.get("QUARRY_KEY_FILE")
        if file and not key:
            key = _key_in(Path(file))
    key = key.strip()
    if re.fullmatch(r"[!-~]*", key) is None:
        detail = "the API key is not one word of printable ASCII characters, so it is not sent"
        cure = "give the key alone, in QUARRY_KEY or the file of QUARRY_KEY_FILE"
        raise ProblemReceived(KeyRefused(detail, cure=cure).problem())
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx2.Limits(keepalive_expiry=KEPT_S)
    options = {"headers": headers, "limits": limits, "timeout": TIMEOUT_S, "trust_env": False}
    return {"base_url": _base_url(server), "verify": _trusted(), **options}


def _key_in(file: Path) -> str:
    """Return the text of `QUARRY_KEY_FILE`. Raises ProblemReceived."""
    try:
        return file.read_text(errors="replace")
    except OSError as error:
        detail, cure = f"{file} cannot be read: {error.strerror}", "name a file that this user can read"
        raise ProblemReceived(KeyRefused(detail, field="QUARRY_KEY_FILE", cure=cure).problem()) from error


def _trusted() -> ssl.SSLContext | bool:
    """Return whose certificates are trusted: those that the environment names, else the system's."""
    named = any(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    return ssl.create_default_context() if named else True


def _read(call: Call[Answer], response: httpx2.Response) -> Answer:
    """Return a successful answer, parsed. Raises ProblemReceived."""
    if not response.is_success:
        raise refused(response)
    try:
        return call.read(response)
    except ValidationError as error:
        raise unreadable(response, error) from error


def _appended(file: BinaryIO, part: FilePart) -> bool:
    """Append a part to `file`, and return whether more follows. Raises OSError."""
    file.write(part.content)
    missing = part.num_bytes - file.tell()
    if missing and not part.content:
        raise OSError(f"the file that is read ends {missing} bytes before its length")
    return missing > 0
