"""What every source yields: rows, each a sample or a named reject; and the rows of a request itself."""

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
        """Bound the detail, and escape lone surrogates: it may quote what a user wrote."""
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
    """A row and what it holds.

    `source_id` is the id that the user gave, else the file and row number, else the row number.
    """

    source_id: str
    content: Sample | RowReject


class RowSource(Protocol):
    """A source. Every method may be called more than once and says the same.

    Files are not looked for before `listed`; the other methods need what it returns.
    """

    def listed(self) -> "RowSource":
        """Return the source with its files found. Whose files they are decides how long that takes.

        Raises SourceRefused.
        """

    def fingerprint(self, watch: Callable[[], None] = lambda: None) -> str:
        """Return a digest that changes when the rows do; `watch` is called often, and may end it.

        Raises SourceRefused, HubUnavailable.
        """

    def check_unchanged(self) -> None:
        """Return if nobody has written to it since its fingerprint was taken. Raises SourceRefused."""

    def frozen(self) -> object:
        """Return what `open_source` opens this source by again, as JSON, however it has grown."""

    def rows(self) -> Iterator[SourceRow]:
        """Yield the rows in order, in bounded memory; a bad row is a reject.

        Raises SourceRefused where the source cannot be read (on), HubUnavailable.
        """


@dataclass(frozen=True, slots=True)
class InlineRows:
    """The samples of a request, which the schema has checked."""

    source: InlineSource
    document: str | None = None
    """The request as JSON, of whose samples `source` has the first alone: they are read by `listed`."""

    def listed(self) -> RowSource:
        """Return it with all of its samples."""
        if self.document is None:
            return self
        source = ExtractRequest.model_validate_json(self.document).source
        return InlineRows(source) if isinstance(source, InlineSource) else self

    def fingerprint(self, watch: Callable[[], None] = lambda: None) -> str:
        """Return the sha256 of the samples' canonical JSON."""
        return f"inline:{canonical_sha256(self.source.model_dump(mode='json'))}"

    def check_unchanged(self) -> None:
        """Return: nobody writes to it."""

    def frozen(self) -> object:
        """Return nothing: the request holds all of it."""
        return None

    def rows(self) -> Iterator[SourceRow]:
        """Yield the samples."""
        for position, sample in enumerate(self.source.samples):
            yield SourceRow(sample.id or str(position), sample)
