"""The rows that every source yields, each a sample or a named reject; and the rows of an inline source."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from schemas.digest import canonical_sha256
from schemas.request import ExtractRequest
from schemas.source import InlineSource, Sample

MAX_DETAIL_CHARS = 500


class RejectReason(StrEnum):
    """Why a row is not in the dataset. The names are stable: people count and filter by them."""

    NOT_JSON = "not-json"
    LINE_TOO_LONG = "line-too-long"
    NOT_AN_OBJECT = "not-an-object"
    NO_SAMPLE = "no-sample"
    UNKNOWN_ROLE = "unknown-role"
    NOT_TEXT = "not-text"
    BAD_TOOL_CALL = "bad-tool-call"
    INVALID_SAMPLE = "invalid-sample"
    NO_PROMPT = "no-prompt"
    TEMPLATE_FAILED = "template-failed"
    RENDER_TOO_LONG = "render-too-long"
    TURN_BOUNDARIES = "turn-boundaries"
    EMPTY = "empty"
    ID_OUTSIDE_VOCABULARY = "id-outside-vocabulary"
    TOO_LONG = "too-long"
    NOTHING_SUPERVISED = "nothing-supervised"
    TOO_FEW_SUPERVISED = "too-few-supervised"
    DUPLICATE = "duplicate"
    CONVERSATION_ENDED = "conversation-ended"
    ANSWER_REJECTED = "answer-rejected"
    BROKEN_TOOL_CALL = "broken-tool-call"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True)
class RowReject:
    """A row that cannot become a sample; `detail` is for people, at most `MAX_DETAIL_CHARS` long."""

    reason: RejectReason
    detail: str

    def __post_init__(self) -> None:
        """Limit the detail and escape lone surrogates: it may quote user input."""
        text = self.detail.encode(errors="backslashreplace").decode()
        if len(text) > MAX_DETAIL_CHARS:
            text = text[: MAX_DETAIL_CHARS - 3] + "..."
        object.__setattr__(self, "detail", text)


class RejectedError(Exception):
    """Carries a reject out of the functions that read or tokenize a row."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reject = RowReject(reason, detail)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row and its content.

    `source_id` is the row's own id, else the file and row number, else the row number.
    """

    source_id: str
    content: Sample | RowReject


class RowSource(Protocol):
    """A source. Every method may be called more than once and returns the same.

    Files are not looked up before `listed`; call the other methods on its result.
    """

    def listed(self) -> "RowSource":
        """Return the source with its files listed. How long that takes depends on untrusted content.

        Raises SourceRefused.
        """

    def fingerprint(self, watch: Callable[[], None] = lambda: None) -> str:
        """Return a digest that changes when the rows do; `watch` is called often, and may raise.

        Raises SourceRefused, HubUnavailable.
        """

    def check_unchanged(self) -> None:
        """Raise SourceRefused if the source was written to since its fingerprint was taken."""

    def frozen(self) -> object:
        """Return JSON with which `open_source` reopens this source unchanged, even if it has grown."""

    def rows(self) -> Iterator[SourceRow]:
        """Yield the rows in order, in bounded memory; a bad row becomes a reject.

        Raises SourceRefused if the source cannot be read, or not to its end; HubUnavailable.
        """


@dataclass(frozen=True, slots=True)
class InlineRows:
    """The samples of a request, which the schema has checked."""

    source: InlineSource
    document: str | None = None
    """The request as JSON, if `source` has only its first sample: `listed` reads all of them."""

    def listed(self) -> RowSource:
        """Return the source with all of its samples."""
        if self.document is None:
            return self
        source = ExtractRequest.model_validate_json(self.document).source
        return InlineRows(source) if isinstance(source, InlineSource) else self

    def fingerprint(self, watch: Callable[[], None] = lambda: None) -> str:
        """Return the sha256 of the samples' canonical JSON."""
        return f"inline:{canonical_sha256(self.source.model_dump(mode='json'))}"

    def check_unchanged(self) -> None:
        """Do nothing: the samples cannot change."""

    def frozen(self) -> object:
        """Return None: the request holds all of it."""
        return None

    def rows(self) -> Iterator[SourceRow]:
        """Yield the samples."""
        for position, sample in enumerate(self.source.samples):
            yield SourceRow(sample.id or str(position), sample)
