"""Reads request bodies: checks JSON bytes or parsed documents, with errors that name the field."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from schemas.request import ExtractRequest
from schemas.schedule import PostedSamples
from schemas.source import InlineSource, Sample
from service import apart
from service.errors import RequestError, ServiceBusy
from service.repeated_fields import check_fields, clipped
from service.settings import Settings

NODE_BYTES = 16
MAX_ERRORS_LISTED = 20

Body = TypeVar("Body", bound=BaseModel)
Read = TypeVar("Read")

Fault = tuple[str | None, ErrorDetails]
"""A dotted path in the document, or None for the whole document, and pydantic's error there."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked request of any length: `document` is the whole request as canonical JSON.

    `request` has only the first of its inline samples, all of which were checked.
    """

    request: ExtractRequest
    document: str

    @classmethod
    def of(cls, request: ExtractRequest) -> Self:
        """Make one from a whole request."""
        document, source = request.canonical_json(), request.source
        if isinstance(source, InlineSource):
            first = source.model_copy(update={"samples": source.samples[:1]})
            request = request.model_copy(update={"source": first})
        return cls(request, document)


@dataclass(frozen=True, slots=True)
class CheckedSamples:
    """Posted samples as stored in a spool, a line of JSON each; ids not given are the content's hash."""

    number: int
    lines: bytes

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """Make one from samples."""
        from service.plan.content_hashes import content_hash  # imports pyarrow

        named = (
            sample if sample.id is not None else sample.model_copy(update={"id": content_hash(sample).hex()})
            for sample in samples
        )
        lines = (f"{sample.model_dump_json(exclude_none=True)}\n" for sample in named)
        return cls(len(samples), "".join(lines).encode())


_CURES = {
    "extra_forbidden": "remove the field, or fix its spelling",
    "missing": "add the field",
    "model_type": "send a JSON object",
    "model_attributes_type": "send a JSON object",
    "union_tag_not_found": "add a 'kind', such as 'file' or 'hub'",
}
_WORDS = {"union_tag_not_found": "has no 'kind'"}
"""What is said instead of pydantic's own words, of which only its users know the meaning."""


def weight(raw: bytes, limit_bytes: int) -> int:
    """Return the length of `raw`, which is JSON, plus `NODE_BYTES` for each object, list and field in it.

    It may count too much if the result is at most `limit_bytes`, since brackets in strings are then counted,
    too. As Python objects, `[{},{},...]` takes thirty times its length in memory.
    """
    nodes = _count_nodes(raw)
    if len(raw) + NODE_BYTES * nodes > limit_bytes:
        # The excess may be only brackets and colons in strings.
        outside_strings = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
        nodes = _count_nodes(b"".join(outside_strings))
    return len(raw) + NODE_BYTES * nodes


def _count_nodes(text: bytes) -> int:
    return sum(map(text.count, (b"{", b"[", b":")))


def parse_json(raw: bytes, place: str = "the body") -> object:
    """Return the document in `raw` (UTF-8 JSON, at most 200 levels deep, no NaN, no lone surrogate).

    Raises:
        RequestError: names the line and column of the first fault, or the field that an object has twice.
    """
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"{place} is not JSON: {error}", cure="send one JSON object in UTF-8") from error
    check_fields(raw, place)
    return document


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Return the value of `kind` in a body. Raises as `parse_json` and `parse_body`."""
    return parse_body(kind, parse_json(raw))


def read_request(raw: bytes) -> CheckedRequest:
    """Return the checked request in a body. Raises as `read_body`."""
    return CheckedRequest.of(read_body(ExtractRequest, raw))


def read_samples(raw: bytes) -> CheckedSamples:
    """Return the checked samples in a body. Raises as `read_body`."""
    return CheckedSamples.of(read_body(PostedSamples, raw).samples)


def read_weighed(read: Callable[[bytes], Read], raw: bytes, limit_bytes: int) -> tuple[int, Read | None]:
    """Return a body's weight, and the result of `read` if the weight is in the limit. Raises as `read`."""
    weighed = weight(raw, limit_bytes)
    return weighed, read(raw) if weighed <= limit_bytes else None


def read_apart(
    read: Callable[[bytes], Read], raw: bytes, limit_bytes: int, settings: Settings
) -> tuple[int, Read | None]:
    """Call `read_weighed` in a process of its own.

    Checking, serializing and freeing a large body's objects happens in C code and the garbage collector,
    which block every thread for a tenth of a second. Raises what `read` raises, RequestError, ServiceBusy.
    """
    memory_bytes, deadline_s = settings.plan_memory_bytes, settings.plan_silence_s
    try:
        return apart.call(
            read_weighed, read, raw, limit_bytes, memory_bytes=memory_bytes, deadline_s=deadline_s
        )
    except apart.Ended as error:
        if error.is_passing:
            detail = f"the process that read the body {error}"
            raise ServiceBusy(detail, cure="send it again later") from error
        cure = "send fewer samples at once, or raise QUARRY_PLAN_MEMORY_BYTES"
        raise RequestError(f"the process that read the body {error}", cure=cure) from error


def parse_body(kind: type[Body], document: object) -> Body:
    """Return the document as a value of `kind`.

    Raises:
        RequestError: `field` is the dotted path of the first fault, `detail` lists up to `MAX_ERRORS_LISTED`.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        raise invalid(_causes([(dotted(fault, document), fault) for fault in errors])) from error


def invalid(faults: Sequence[Fault]) -> RequestError:
    """Return one error that names the first of `faults` in `field` and lists them in `detail`."""
    lines = dict.fromkeys(
        f"{field}: {_message(fault)}" if field else _message(fault)
        for field, fault in faults[:MAX_ERRORS_LISTED]
    )
    more = len(faults) - MAX_ERRORS_LISTED
    detail = "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
    field, first = faults[0]
    return RequestError(detail, field=field, cure=_CURES.get(first["type"]))


def dotted(fault: ErrorDetails, document: object) -> str | None:
    """Return the path of `fault` in `document`, such as `source.samples.3.messages`; None for all of it.

    Pydantic's own path also has the names of union branches, which are not in the document: only parts that
    exist in `document` are kept, and the name of a missing field.
    """
    parts: list[str] = []
    here: Any = document  # any JSON value
    last = len(fault["loc"]) - 1
    for number, part in enumerate(fault["loc"]):
        if isinstance(here, dict):
            inside = part in here
        else:
            inside = isinstance(here, list | tuple) and isinstance(part, int) and part < len(here)
        if inside:
            here = here[part]
        elif fault["type"] != "missing" or number != last:
            continue
        parts.append(clipped(str(part)))
    return ".".join(parts) or None


def _causes(faults: Sequence[Fault]) -> list[Fault]:
    """Return `faults` without those at a place that contains another fault.

    A tuple whose members are invalid is also reported as too short, and a union reports every branch: the
    deepest fault is the actual one.
    """
    paths = [field.split(".") if field else [] for field, _ in faults]
    inner = {tuple(path[:length]) for path in paths for length in range(len(path))}
    return [fault for fault, path in zip(faults, paths, strict=True) if tuple(path) not in inner]


def _message(fault: ErrorDetails) -> str:
    return clipped(_WORDS.get(fault["type"]) or fault["msg"].removeprefix("Value error, "))
