"""The two clients: what they send and in which order is the same, one blocks and the other awaits."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Generic, ParamSpec, Self, TypeVar, overload

import httpx2
from pydantic import ValidationError

from schemas.job import RESTING_JOB_STATES, JobSummary
from service.client import calls
from service.client.calls import Call, Pages
from service.client.problem import ProblemReceived, bad_key, refused, unreachable, unreadable

DEFAULT_SERVER = "http://127.0.0.1:8642"
KEPT_S = 3.0
"""That a silent connection is used again; the service closes it after five."""
POLL_S = 1.0
MAX_UNANSWERED = 5
PIECE_BYTES = 2**24

P = ParamSpec("P")
Answer = TypeVar("Answer")
Item = TypeVar("Item")


class _Route(Generic[P, Answer]):
    """A method of both clients that sends one call: it returns the answer, or an awaitable of it."""

    def __init__(self, call: Callable[P, Call[Answer]]) -> None:
        self._call, self.__doc__ = call, call.__doc__

    @overload
    def __get__(self, client: "Quarry", owner: type) -> Callable[P, Answer]: ...
    @overload
    def __get__(self, client: "AsyncQuarry", owner: type) -> Callable[P, Awaitable[Answer]]: ...
    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    def __get__(self, client: "Quarry | AsyncQuarry | None", owner: type) -> Any:
        return self if client is None else lambda *a, **k: client.send(self._call(*a, **k))


class _List(Generic[P, Item]):
    """A method of both clients that asks for page after page: it returns an iterator, or one that awaits."""

    def __init__(self, pages: Callable[P, Pages[Item]]) -> None:
        self._pages, self.__doc__ = pages, pages.__doc__

    @overload
    def __get__(self, client: "Quarry", owner: type) -> Callable[P, Iterator[Item]]: ...
    @overload
    def __get__(self, client: "AsyncQuarry", owner: type) -> Callable[P, AsyncIterator[Item]]: ...
    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    def __get__(self, client: "Quarry | AsyncQuarry | None", owner: type) -> Any:
        return self if client is None else lambda *a, **k: client.items(self._pages(*a, **k))


class _Routes:
    """What both clients can do. Every method may raise ProblemReceived; `calls` says what each takes."""

    submit, estimate = _Route(calls.submit), _Route(calls.estimate)
    jobs, job, request = _List(calls.jobs), _Route(calls.job), _Route(calls.request)
    cancel, pause, resume = _Route(calls.cancel), _Route(calls.pause), _Route(calls.resume)
    set_priority, delete = _Route(calls.set_priority), _Route(calls.delete)
    rejects, units, unit_page = _List(calls.rejects), _List(calls.units), _Route(calls.unit_page)
    manifest, file = _Route(calls.manifest), _Route(calls.file)
    consumers, acknowledge = _Route(calls.consumers), _Route(calls.acknowledge)
    remove_consumer = _Route(calls.remove_consumer)
    redeliver, webhook_secret = _Route(calls.redeliver), _Route(calls.webhook_secret)
    schedules, schedule = _List(calls.schedules), _Route(calls.schedule)
    schedule_request, add_schedule = _Route(calls.schedule_request), _Route(calls.add_schedule)
    change_schedule, delete_schedule = _Route(calls.change_schedule), _Route(calls.delete_schedule)
    run_schedule, runs = _Route(calls.run_schedule), _List(calls.runs)
    post_samples = _Route(calls.post_samples)
    workers, forget_host = _Route(calls.workers), _Route(calls.forget_host)
    keys, add_key, revoke_key = _Route(calls.keys), _Route(calls.add_key), _Route(calls.revoke_key)
    health, readiness = _Route(calls.health), _Route(calls.readiness)


class Quarry(_Routes):
    """One service, for code that blocks. May be used by several threads at once."""

    def __init__(self, server: str | None = None, key: str | None = None) -> None:
        """Prepare for the service at base URL `server`; connects at the first call.

        Without `server` it is that of QUARRY_SERVER, else the one on this machine. Without `key` it is that
        of QUARRY_KEY, or in the file that QUARRY_KEY_FILE names. Proxies of the environment are not used.

        Raises OSError: the file cannot be read. ProblemReceived: the key cannot be sent.
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
        """Send one of `service.client.calls` and return its answer. Raises ProblemReceived."""
        try:
            response = self._http.request(call.method, call.path, **_sent(call))
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise unreachable(str(self._http.base_url), error) from error
        return _read(call, response)

    def items(self, pages: Pages[Item]) -> Iterator[Item]:
        """Yield every item of all pages. Raises ProblemReceived."""
        call: Call[Any] | None = pages.first
        while call is not None:
            items, call = _turned(pages, call, self.send(call))
            yield from items

    def follow(self, job_id: str) -> Iterator[JobSummary]:
        """Yield a job every second until it rests; waits for a service that restarts.

        Raises ProblemReceived: the job is not there, or the service has not answered several times.
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
        """Write a file of the dataset, by its path there, to `to`, which it replaces once it is whole.

        Raises ProblemReceived, OSError.
        """
        with _replaced(to) as file:
            while (part := self.file(job_id, path, offset=file.tell(), num_bytes=PIECE_BYTES)).content:
                file.write(part.content)
                if file.tell() >= part.num_bytes:
                    return
            raise OSError(f"{path} ends at byte {file.tell()}, expected {part.num_bytes}")


class AsyncQuarry(_Routes):
    """One service, for code that awaits, with the methods of `Quarry`."""

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
        """Send one of `service.client.calls` and return its answer. Raises ProblemReceived."""
        try:
            response = await self._http.request(call.method, call.path, **_sent(call))
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise unreachable(str(self._http.base_url), error) from error
        return _read(call, response)

    async def items(self, pages: Pages[Item]) -> AsyncIterator[Item]:
        """Yield every item of all pages. Raises ProblemReceived."""
        call: Call[Any] | None = pages.first
        while call is not None:
            items, call = _turned(pages, call, await self.send(call))
            for item in items:
                yield item

    async def follow(self, job_id: str) -> AsyncIterator[JobSummary]:
        """Yield a job every second until it rests, as `Quarry.follow` does."""
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
        """Write a file of the dataset to `to`, as `Quarry.download` does."""
        with _replaced(to) as file:
            while (part := await self.file(job_id, path, offset=file.tell(), num_bytes=PIECE_BYTES)).content:
                await asyncio.to_thread(file.write, part.content)
                if file.tell() >= part.num_bytes:
                    return
            raise OSError(f"{path} ends at byte {file.tell()}, expected {part.num_bytes}")


class _Patience:
    """How often a service that is followed has not answered; until it has once, it need not be there."""

    def __init__(self) -> None:
        self._unanswered = MAX_UNANSWERED

    def unanswered(self, error: ProblemReceived) -> None:
        self._unanswered += 1
        passes = error.problem.status == 429 or error.problem.status >= 500
        if not passes or self._unanswered > MAX_UNANSWERED:
            raise error

    def rests(self, job: JobSummary) -> bool:
        self._unanswered = 0
        return job.state in RESTING_JOB_STATES


def _options(server: str | None, key: str | None) -> dict[str, Any]:
    """Return what an HTTP client is made with. Raises OSError."""
    server = server or os.environ.get("QUARRY_SERVER") or DEFAULT_SERVER
    file = os.environ.get("QUARRY_KEY_FILE") if key is None else None
    key = os.environ.get("QUARRY_KEY", "") if key is None else key
    if file:
        key = Path(file).read_text()
    key = key.strip()
    if re.fullmatch(r"[!-~]*", key) is None:
        raise bad_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx2.Limits(keepalive_expiry=KEPT_S)
    return {"base_url": server, "headers": headers, "limits": limits, "trust_env": False}


def _sent(call: Call[Any]) -> dict[str, Any]:
    """Return a call's options as httpx2 takes them."""
    query = {name: value for name, value in call.query.items() if value is not None}
    return {"params": query, "json": call.body, "headers": call.headers, "timeout": call.timeout_s}


def _read(call: Call[Answer], response: httpx2.Response) -> Answer:
    """Return a good answer. Raises ProblemReceived."""
    if not response.is_success:
        raise refused(response)
    try:
        return call.read(response)
    except ValidationError as error:
        raise unreadable(response, error) from error


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file beside `path`, which takes its place if the block ends well."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            yield file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _turned(pages: Pages[Item], call: Call[Any], page: Any) -> tuple[Any, Call[Any] | None]:  # noqa: ANN401 - a page of any kind
    """Return a page's items, and the call of the next one."""
    items, following = pages.of_page(page)
    if following is None or following == call.query.get(pages.option):
        return items, None
    first = pages.first
    return items, Call(first.method, first.path, first.read, {**first.query, pages.option: following})
