"""The routes of a service, each defined once: its path, its arguments and its answer."""

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload
from urllib.parse import quote
from uuid import uuid4

import httpx2
from pydantic import BaseModel

from schemas.base import Wire
from schemas.dataset.manifest import Manifest
from schemas.job import (
    ConsumerPage,
    Estimate,
    Health,
    JobPage,
    JobState,
    JobSummary,
    Problem,
    Readiness,
    RejectPage,
    UnitPage,
)
from schemas.keys import IssuedKey, KeyList, KeyView, NewKey
from schemas.request import ExtractRequest
from schemas.schedule import (
    NewSchedule,
    PostedCount,
    RunPage,
    RunView,
    ScheduleChange,
    SchedulePage,
    ScheduleView,
)
from schemas.source import Sample
from schemas.webhook import WebhookSecret
from schemas.worker import Forgotten, HostList
from service.client.problem import ProblemReceived, not_quarrys
from service.errors import NotFound, OptionRefused

TIMEOUT_S, CHECK_S = 30.0, 300.0
"""For an answer; and for one to a request that is checked first, which may involve the Hub."""

P = ParamSpec("P")
Answer = TypeVar("Answer")
Item = TypeVar("Item")
Page = TypeVar("Page", bound=Wire)
Blocking = TypeVar("Blocking", covariant=True)
Awaiting = TypeVar("Awaiting", covariant=True)
Document = BaseModel | Mapping[str, Any]
"""A body: one of the classes of `schemas`, or the same as plain JSON, which the service checks."""


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request, and how its answer is read. `options` are those of `httpx2.Client.request`."""

    method: str
    path: str
    read: Callable[[httpx2.Response], Answer]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pages(Generic[Item]):
    """A list in pages. `of_page` returns a page's items and the next page's option, null on the last.

    `unreadable` returns the problems of a page's items that cannot be read, for the end of the list.
    """

    first: Call[Any]
    option: str
    of_page: Callable[[Any], tuple[Iterable[Item], object]]
    unreadable: Callable[[Any], Iterable[Problem]]

    def turned(self, call: Call[Any], page: Wire) -> tuple[Iterable[Item], Call[Any] | None]:
        """Return the items of the page that answered `call`, and the call of the next one."""
        items, following = self.of_page(page)
        before = call.options.get("params", {})
        query = {**before, self.option: following}
        if following is None or query == before:
            return items, None
        return items, replace(call, options={"params": query})


@dataclass(frozen=True, slots=True)
class FilePart:
    """A range of a file, shorter where the file ends; `num_bytes` is the length of the whole file."""

    content: bytes
    num_bytes: int


class _Blocks(Protocol):
    def close(self) -> None: ...


class _Awaits(Protocol):
    async def close(self) -> None: ...


class _Method(Protocol[P, Blocking, Awaiting]):
    """A method that returns one type in a client that blocks, and another in one that awaits."""

    @overload
    def __get__(self, client: _Blocks, owner: type) -> Callable[P, Blocking]: ...
    @overload
    def __get__(self, client: _Awaits, owner: type) -> Callable[P, Awaiting]: ...


Sent = dict[str, Any] | None
_Described = Callable[Concatenate[Any, P], Sent]
"""What `httpx2` sends besides the arguments in the path; its docstring is the method's."""


def _route(
    method: str, path: str, read: Callable[[httpx2.Response], Answer]
) -> Callable[[_Described[P]], _Method[P, Answer, Awaitable[Answer]]]:
    """Make a method that sends one call; its arguments fill `path` by their names."""
    return _method(Call(method, path, read, {}), lambda client, call: client.send(call))


def _list(
    path: str,
    page: type[Page],
    option: str,
    of_page: Callable[[Page], tuple[Iterable[Item], object]],
    unreadable: Callable[[Page], Iterable[Problem]] = lambda page: (),
) -> Callable[[_Described[P]], _Method[P, Iterator[Item], AsyncIterator[Item]]]:
    """Make a method that lists the items of all pages. `of_page` returns a page's, and the next `option`."""
    listing = Call("GET", path, _of(page), {})
    return _method(listing, lambda client, call: client.items(Pages(call, option, of_page, unreadable)))


def _method(template: Call[Any], do: Callable[[Any, Call[Any]], object]) -> Callable[[Any], Any]:
    """Return a decorator: `do` gets the client and the call, with the decorated function's options."""

    def made(described: Callable[..., Sent]) -> Callable[..., object]:
        @wraps(described)
        def method(client: object, *arguments: object, **named: object) -> object:
            names = inspect.signature(described).bind(client, *arguments, **named).arguments
            options = described(client, *arguments, **named) or {}
            return do(client, replace(template, path=_filled(template.path, names), options=options))

        return method

    return made


def _filled(path: str, names: Mapping[str, object]) -> str:
    """Fill `names` into `path`; only the one called `path` may have slashes. Raises ProblemReceived."""
    quoted = {
        name: quote(str(value), safe="/" * (name == "path"), errors="replace")
        for name, value in names.items()
    }
    filled = path.format_map(quoted)
    if not {"", ".", ".."}.isdisjoint(filled.split("/")[1:]):
        raise ProblemReceived(NotFound(f"{filled} names nothing").problem())
    return filled


def _sendable(key: str) -> str:
    """Return an idempotency key that a service may take. Raises ProblemReceived."""
    # An empty one would be a new job each time; a header neither begins nor ends with a space.
    if re.fullmatch("[!-~]([ -~]*[!-~])?", key) is None:
        detail = f"{key!r} is not an idempotency key"
        cure = "give printable ASCII without a space at either end, or no key"
        raise ProblemReceived(OptionRefused(detail, field="key", cure=cure).problem())
    return key


def _json(document: Document) -> object:
    """Return what is sent: of a model, the fields that were set."""
    if isinstance(document, BaseModel):
        return document.model_dump(mode="json", exclude_unset=True)
    return document


def _of(model: type[Page]) -> Callable[[httpx2.Response], Page]:
    return lambda response: model.answered(response.content)


def _nothing(_: httpx2.Response) -> None:
    return None


def _part(response: httpx2.Response) -> FilePart:
    """Read the answer to a request for a range, which may be the whole file. Raises ProblemReceived."""
    first, last = (int(number) for number in re.findall("[0-9]+", response.request.headers["range"]))
    if response.status_code != httpx2.codes.PARTIAL_CONTENT:
        return FilePart(response.content[first : last + 1], len(response.content))
    part = re.fullmatch("bytes ([0-9]+)-[0-9]+/([0-9]+)", response.headers.get("content-range", ""))
    if part is None or int(part[1]) != first:
        raise not_quarrys(response, "another range than it was asked for")
    return FilePart(response.content, int(part[2]))


class Routes:
    """What both clients can do. Every method may raise ProblemReceived."""

    @_route("POST", "/extract", _of(JobSummary))
    def submit(self, request: Document, *, key: str | None = None, priority: int = 0) -> Sent:
        """Submit a job. The same `key` and request give the same job; without a key it is a new job."""
        headers = {"Idempotency-Key": uuid4().hex if key is None else _sendable(key)}
        query = {"priority": priority}
        return {"params": query, "json": _json(request), "headers": headers, "timeout": CHECK_S}

    @_route("POST", "/estimate", _of(Estimate))
    def estimate(self, request: Document) -> Sent:
        """Estimate what a job would need; reads its source but runs nothing."""
        return {"json": _json(request), "timeout": 3600.0}

    @_list("/jobs", JobPage, "cursor", lambda page: (page.jobs, page.next_cursor))
    def jobs(self, *, state: JobState | None = None) -> Sent:
        """List jobs, newest first."""
        return {"params": {"limit": 200} | ({"state": state} if state else {})}

    @_route("GET", "/jobs/{job_id}", _of(JobSummary))
    def job(self, job_id: str) -> None:
        """Return the state of a job."""

    @_route("GET", "/jobs/{job_id}/request", _of(ExtractRequest))
    def request(self, job_id: str) -> None:
        """Return the request that a job was made from, with every default filled in."""

    @_route("POST", "/jobs/{job_id}/cancel", _of(JobSummary))
    def cancel(self, job_id: str) -> None:
        """Cancel a job; what it has committed is kept."""

    @_route("POST", "/jobs/{job_id}/pause", _of(JobSummary))
    def pause(self, job_id: str) -> None:
        """Pause a job until it is resumed; what it has committed is kept."""

    @_route("POST", "/jobs/{job_id}/resume", _of(JobSummary))
    def resume(self, job_id: str) -> None:
        """Queue a paused, blocked, failed or cancelled job again."""

    @_route("PATCH", "/jobs/{job_id}", _of(JobSummary))
    def set_priority(self, job_id: str, priority: int) -> Sent:
        """Set a job's priority; jobs with a higher one run first."""
        return {"json": {"priority": priority}}

    @_route("DELETE", "/jobs/{job_id}", _nothing)
    def delete(self, job_id: str, *, dataset: bool = False) -> Sent:
        """Delete a job that has ended and, with `dataset`, its dataset in the service's data folder."""
        return {"params": {"dataset": "delete" if dataset else "keep"}}

    @_list("/jobs/{job_id}/rejects", RejectPage, "after", lambda page: (page.rejects, page.next_after))
    def rejects(self, job_id: str) -> None:
        """List the rejected samples, and why."""

    @_list(
        "/jobs/{job_id}/units",
        UnitPage,
        "after",
        lambda page: (page.units, page.next_after if page.units else None),
    )
    def units(self, job_id: str) -> None:
        """List the units committed so far with their files, in commit order."""

    @_route("GET", "/jobs/{job_id}/units", _of(UnitPage))
    def unit_page(self, job_id: str, *, after: int = -1, limit: int = 100, wait_s: int = 0) -> Sent:
        """List committed units after the place `after`; wait up to `wait_s` if there are none."""
        query = {"after": after, "limit": limit, "wait": wait_s}
        return {"params": query, "timeout": TIMEOUT_S + wait_s}

    @_route("GET", "/jobs/{job_id}/manifest", _of(Manifest))
    def manifest(self, job_id: str) -> None:
        """Return the manifest of a completed job."""

    @_route("GET", "/jobs/{job_id}/files/{path}", _part)
    def file(self, job_id: str, path: str, *, offset: int = 0, num_bytes: int) -> Sent:
        """Read a range of a file of the dataset, from the service's data folder."""
        return {"headers": {"Range": f"bytes={offset}-{offset + num_bytes - 1}"}}

    @_route("GET", "/jobs/{job_id}/consumers", _of(ConsumerPage))
    def consumers(self, job_id: str) -> None:
        """List the consumers of a job whose shards are removed once every consumer has read them."""

    @_route("PUT", "/jobs/{job_id}/consumers/{consumer}", _nothing)
    def acknowledge(
        self, job_id: str, consumer: str, after: int = -1, *, expires_s: int | None = None
    ) -> Sent:
        """Register a consumer, or record that it has all units up to the place `after`."""
        return {"json": {"after": after, "expires_s": expires_s}}

    @_route("DELETE", "/jobs/{job_id}/consumers/{consumer}", _nothing)
    def remove_consumer(self, job_id: str, consumer: str) -> None:
        """Remove a consumer, which is then no longer waited for."""

    @_route("POST", "/jobs/{job_id}/webhook", _of(JobSummary))
    def redeliver(self, job_id: str) -> None:
        """Send a job's last report to its webhook again."""

    @_route("GET", "/webhooks/secret", _of(WebhookSecret))
    def webhook_secret(self) -> None:
        """Return the secret that signs the webhooks of the caller's jobs."""

    @_list(
        "/schedules",
        SchedulePage,
        "after",
        lambda page: (page.schedules, page.next_after),
        lambda page: (one.problem for one in page.unreadable),
    )
    def schedules(self) -> Sent:
        """List schedules by name; behind the last, raises ProblemReceived for the first unreadable one."""
        return {"params": {"limit": 200}}

    @_route("GET", "/schedules/{name}", _of(ScheduleView))
    def schedule(self, name: str) -> None:
        """Return the state of a schedule and its next slots."""

    @_route("GET", "/schedules/{name}/request", _of(ExtractRequest))
    def schedule_request(self, name: str) -> None:
        """Return the request that a schedule's jobs are made from."""

    @_route("POST", "/schedules", _of(ScheduleView))
    def add_schedule(self, new: NewSchedule | Mapping[str, Any], *, preview: bool = False) -> Sent:
        """Make a schedule; with `preview`, only check it and return its next slots."""
        return {"params": {"preview": preview}, "json": _json(new), "timeout": CHECK_S}

    @_route("PATCH", "/schedules/{name}", _of(ScheduleView))
    def change_schedule(self, name: str, change: ScheduleChange | Mapping[str, Any]) -> Sent:
        """Change when a schedule's jobs are made, or what they capture; or pause it."""
        return {"json": _json(change), "timeout": CHECK_S}

    @_route("POST", "/schedules/{name}/run", _of(RunView))
    def run_schedule(self, name: str) -> None:
        """Make a job of a schedule now, in addition to those of its slots."""

    @_list(
        "/schedules/{name}/runs",
        RunPage,
        "before",
        lambda page: (page.runs, page.next_before and page.next_before.isoformat()),
    )
    def runs(self, name: str) -> None:
        """List the past slots of a schedule, newest first."""

    @_route("POST", "/schedules/{name}/samples", _of(PostedCount))
    def post_samples(self, name: str, samples: Sequence[Sample | Mapping[str, Any]]) -> Sent:
        """Post up to 100,000 samples for the next job of a schedule of kind `posted`; safe to repeat."""
        return {"json": {"samples": [_json(sample) for sample in samples]}}

    @_route("DELETE", "/schedules/{name}", _nothing)
    def delete_schedule(self, name: str) -> None:
        """Delete a schedule; its jobs stay."""

    @_route("GET", "/workers", _of(HostList))
    def workers(self) -> None:
        """List hosts and their workers, the data folder's host first."""

    @_route("DELETE", "/workers/{host_id}", _of(Forgotten))
    def forget_host(self, host_id: str) -> None:
        """Give up what a host captured but did not store; it is captured again elsewhere."""

    @_route("POST", "/keys", _of(IssuedKey))
    def add_key(self, new: NewKey | Mapping[str, Any]) -> Sent:
        """Make an API key. Only this answer holds its secret."""
        return {"json": _json(new)}

    @_route("GET", "/keys", _of(KeyList))
    def keys(self) -> None:
        """List API keys, oldest first, including revoked and expired ones."""

    @_route("DELETE", "/keys/{key_id}", _of(KeyView))
    def revoke_key(self, key_id: str) -> None:
        """Revoke an API key; its owner's jobs continue."""

    @_route("GET", "/healthz", _of(Health))
    def health(self) -> None:
        """Check that the process is alive."""

    @_route("GET", "/readyz", _of(Readiness))
    def readiness(self) -> None:
        """Check that jobs can be taken."""
