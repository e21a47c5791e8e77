"""The routes of a service as functions: each returns the call that a client sends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx2
from pydantic import BaseModel

from schemas.dataset.manifest import Manifest
from schemas.job import (
    ConsumerPage,
    Estimate,
    Health,
    JobPage,
    JobState,
    JobSummary,
    Readiness,
    RejectPage,
    RejectView,
    UnitPage,
    UnitView,
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

TIMEOUT_S, CHECK_S = 30.0, 300.0
"""For an answer; and for that to a request that is checked first, also by asking the Hub."""

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Model = TypeVar("Model", bound=BaseModel)
Document = BaseModel | Mapping[str, Any]
"""A body: one of the classes of `schemas`, or the same as plain JSON, which the service checks."""


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request, and how its answer is read. Options of the query without a value are not sent."""

    method: str
    path: str
    read: Callable[[httpx2.Response], Answer]
    query: Mapping[str, object] = field(default_factory=dict)
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Pages(Generic[Item]):
    """A list in pages. `of_page` returns a page's items and the next page's option, null on the last."""

    first: Call[Any]
    option: str
    of_page: Callable[[Any], tuple[Sequence[Item], object]]


@dataclass(frozen=True, slots=True)
class FilePart:
    """A range of a file, shorter where the file ends; `num_bytes` is the length of the whole file."""

    content: bytes
    num_bytes: int


def submit(request: Document, *, key: str | None = None, priority: int = 0) -> Call[JobSummary]:
    """Submit a job. The same `key` with the same request is the same job; without one it is a new job."""
    headers = {"Idempotency-Key": key or uuid4().hex}
    query = {"priority": priority}
    return _posted("/extract", _of(JobSummary), request, query=query, headers=headers, timeout_s=CHECK_S)


def estimate(request: Document) -> Call[Estimate]:
    """Say what a job would need; reads its source, runs nothing."""
    return _posted("/estimate", _of(Estimate), request, timeout_s=3600.0)


def jobs(*, state: JobState | None = None) -> Pages[JobSummary]:
    """List jobs, newest first."""
    first = Call("GET", "/jobs", _of(JobPage), {"state": state, "limit": 200})
    return Pages(first, "cursor", lambda page: (page.jobs, page.next_cursor))


def job(job_id: str) -> Call[JobSummary]:
    """Say how a job stands."""
    return Call("GET", _path("jobs", job_id), _of(JobSummary))


def request(job_id: str) -> Call[ExtractRequest]:
    """Return the request that a job was made of, with every default written out."""
    return Call("GET", _path("jobs", job_id, "request"), _of(ExtractRequest))


def cancel(job_id: str) -> Call[JobSummary]:
    """Stop a job; what it has committed is kept."""
    return Call("POST", _path("jobs", job_id, "cancel"), _of(JobSummary))


def pause(job_id: str) -> Call[JobSummary]:
    """Pause a job until it is resumed; what it has committed is kept."""
    return Call("POST", _path("jobs", job_id, "pause"), _of(JobSummary))


def resume(job_id: str) -> Call[JobSummary]:
    """Queue a paused, blocked, failed or cancelled job again."""
    return Call("POST", _path("jobs", job_id, "resume"), _of(JobSummary))


def set_priority(job_id: str, priority: int) -> Call[JobSummary]:
    """Set a job's priority: jobs of a higher one are worked on first."""
    return Call("PATCH", _path("jobs", job_id), _of(JobSummary), body={"priority": priority})


def delete(job_id: str, *, dataset: bool = False) -> Call[None]:
    """Delete a job that has ended, and with `dataset` its dataset in the service's data folder."""
    query = {"dataset": "delete" if dataset else "keep"}
    return Call("DELETE", _path("jobs", job_id), _nothing, query)


def rejects(job_id: str) -> Pages[RejectView]:
    """List the samples that are not in the dataset, and why."""
    first = Call("GET", _path("jobs", job_id, "rejects"), _of(RejectPage))
    return Pages(first, "after", lambda page: (page.rejects, page.next_after))


def units(job_id: str) -> Pages[UnitView]:
    """List the units that are committed so far with their files, in the order of their commits."""
    return Pages(
        unit_page(job_id), "after", lambda page: (page.units, page.next_after if page.units else None)
    )


def unit_page(job_id: str, *, after: int = -1, limit: int = 100, wait_s: int = 0) -> Call[UnitPage]:
    """List committed units behind the place `after`; wait for one if there is none."""
    query = {"after": after, "limit": limit, "wait": wait_s}
    return Call("GET", _path("jobs", job_id, "units"), _of(UnitPage), query, timeout_s=TIMEOUT_S + wait_s)


def manifest(job_id: str) -> Call[Manifest]:
    """Return the whole account of a completed job."""
    return Call("GET", _path("jobs", job_id, "manifest"), _of(Manifest))


def file(job_id: str, path: str, *, offset: int = 0, num_bytes: int) -> Call[FilePart]:
    """Read a range of a file of the dataset, from the service's data folder."""

    def read(response: httpx2.Response) -> FilePart:
        if part_of := response.headers.get("content-range"):
            return FilePart(response.content, int(part_of.rpartition("/")[2]))
        return FilePart(response.content[offset : offset + num_bytes], len(response.content))

    headers = {"Range": f"bytes={offset}-{offset + num_bytes - 1}"}
    return Call("GET", _path("jobs", job_id, "files", *path.split("/")), read, headers=headers)


def consumers(job_id: str) -> Call[ConsumerPage]:
    """List the consumers of a job whose shards go once all of them have read them."""
    return Call("GET", _path("jobs", job_id, "consumers"), _of(ConsumerPage))


def acknowledge(job_id: str, consumer: str, after: int = -1, *, expires_s: int | None = None) -> Call[None]:
    """Make a consumer, or say that it has all units up to the place `after`."""
    body = {"after": after, "expires_s": expires_s}
    return Call("PUT", _path("jobs", job_id, "consumers", consumer), _nothing, body=body)


def remove_consumer(job_id: str, consumer: str) -> Call[None]:
    """Wait for a consumer no longer."""
    return Call("DELETE", _path("jobs", job_id, "consumers", consumer), _nothing)


def redeliver(job_id: str) -> Call[JobSummary]:
    """Report a job's last end to its webhook once more."""
    return Call("POST", _path("jobs", job_id, "webhook"), _of(JobSummary))


def webhook_secret() -> Call[WebhookSecret]:
    """Say what the webhooks of the caller's jobs are signed with."""
    return Call("GET", "/webhooks/secret", _of(WebhookSecret))


def schedules() -> Pages[ScheduleView]:
    """List schedules by name."""
    first = Call("GET", "/schedules", _of(SchedulePage), {"limit": 200})
    return Pages(first, "after", lambda page: (page.schedules, page.next_after))


def schedule(name: str) -> Call[ScheduleView]:
    """Say how a schedule stands, and when its next slots are."""
    return Call("GET", _path("schedules", name), _of(ScheduleView))


def schedule_request(name: str) -> Call[ExtractRequest]:
    """Return the request that a schedule's jobs are made of."""
    return Call("GET", _path("schedules", name, "request"), _of(ExtractRequest))


def add_schedule(new: NewSchedule | Mapping[str, Any], *, preview: bool = False) -> Call[ScheduleView]:
    """Make a schedule; with `preview` only check it and return its next slots."""
    query = {"preview": "true" if preview else "false"}
    return _posted("/schedules", _of(ScheduleView), new, query=query, timeout_s=CHECK_S)


def change_schedule(name: str, change: ScheduleChange | Mapping[str, Any]) -> Call[ScheduleView]:
    """Change when a schedule's jobs are made, or pause it."""
    return Call("PATCH", _path("schedules", name), _of(ScheduleView), body=_json(change))


def run_schedule(name: str) -> Call[RunView]:
    """Make a job of a schedule now, beside its slots."""
    return Call("POST", _path("schedules", name, "run"), _of(RunView))


def runs(name: str) -> Pages[RunView]:
    """List the slots of a schedule that have passed, newest first."""
    first = Call("GET", _path("schedules", name, "runs"), _of(RunPage))
    return Pages(first, "before", lambda page: (page.runs, page.next_before and page.next_before.isoformat()))


def post_samples(name: str, samples: Sequence[Sample | Mapping[str, Any]]) -> Call[PostedCount]:
    """Post samples, 1,000 at most, for the next job of a schedule of kind `posted`; safe to repeat."""
    body = {"samples": [_json(sample) for sample in samples]}
    return _posted(_path("schedules", name, "samples"), _of(PostedCount), body)


def delete_schedule(name: str) -> Call[None]:
    """Delete a schedule; its jobs stay."""
    return Call("DELETE", _path("schedules", name), _nothing)


def workers() -> Call[HostList]:
    """List hosts and their workers; the data folder's host comes first."""
    return Call("GET", "/workers", _of(HostList))


def forget_host(host_id: str) -> Call[Forgotten]:
    """Give up what a host had captured and not stored: it is captured again elsewhere."""
    return Call("DELETE", _path("workers", host_id), _of(Forgotten))


def add_key(new: NewKey | Mapping[str, Any]) -> Call[IssuedKey]:
    """Make an API key. The answer alone holds its secret."""
    return _posted("/keys", _of(IssuedKey), new)


def keys() -> Call[KeyList]:
    """List API keys, oldest first; revoked and expired ones too."""
    return Call("GET", "/keys", _of(KeyList))


def revoke_key(key_id: str) -> Call[KeyView]:
    """Revoke an API key; its owner's jobs go on."""
    return Call("DELETE", _path("keys", key_id), _of(KeyView))


def health() -> Call[Health]:
    """Say whether the process answers."""
    return Call("GET", "/healthz", _of(Health))


def readiness() -> Call[Readiness]:
    """Say whether jobs can be taken."""
    return Call("GET", "/readyz", _of(Readiness))


def _path(*parts: str) -> str:
    """Return a path of the service. Raises ValueError for a part that would lead elsewhere."""
    if not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"expected names, got {'/'.join(parts)!r}")
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def _of(model: type[Model]) -> Callable[[httpx2.Response], Model]:
    """Return what reads a model; fields that a newer service sends are left out."""
    return lambda response: model.model_validate_json(response.content, extra="ignore")


def _nothing(_: httpx2.Response) -> None:
    return None


def _json(document: Document) -> object:
    """Return what is sent: of a model, what was set."""
    if isinstance(document, BaseModel):
        return document.model_dump(mode="json", exclude_unset=True)
    return document


def _posted(
    path: str,
    read: Callable[[httpx2.Response], Answer],
    body: Document,
    **options: Any,  # noqa: ANN401
) -> Call[Answer]:
    return Call("POST", path, read, body=_json(body), **options)
