"""What a job takes its samples from, and what a sample is.

The long tuples fail fast, one error each: a body of a million wrong values would otherwise make a million
error objects, at 500 bytes and 7 microseconds apiece.
"""

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.base import OpenEnum, Wire
from schemas.names import LabelName, RepoId

MAX_SAMPLE_TOKENS = 2_097_152
MAX_INLINE_SAMPLES = 100_000
MAX_MESSAGES = 10_000
MAX_TEXT_CHARS = 16_777_216
MAX_LABELS = 32
MAX_JSON_VALUES = 100_000
MAX_JSON_DEPTH = 64
"""Pydantic writes 255 levels as JSON, and Python's interpreter recurses a thousand."""
MAX_TOKEN_ID = 2**31 - 1

Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]
NO_NUL = r"^[^\x00]+$"
"""Neither file names nor PostgreSQL text can hold a NUL."""
Name = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=NO_NUL)]
FileSuffix = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[^\x00/]+$")]
Label = Annotated[str, StringConstraints(max_length=1000)]
WILDCARD = re.compile(r"[*?\[]")
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]


def _json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse infinities, NaN and dates: JSON has none, and no database column or client would read them back.

    Pydantic's `JsonValue` copies the value at each use and takes ten times as long. No other thread runs
    during encoding, so the value's size is bounded.
    """
    level: list[Any] = [value]
    count = depth = 0
    while level:
        inside = [held.values() if isinstance(held, dict) else held for held in level]
        count, depth = count + sum(map(len, inside)), depth + 1
        if count > MAX_JSON_VALUES:
            raise ValueError(f"more than {MAX_JSON_VALUES} values")
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} objects and lists")
        level = [held for values in inside for held in values if isinstance(held, dict | list)]
    try:
        json.dumps(value, allow_nan=False, sort_keys=True)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_json)]  # whatever JSON holds


class Message(Wire):
    """One turn, in OpenAI's format. `content` may be null only if `tool_calls` is given."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    tool_calls: tuple[JsonObject, ...] | None = Field(default=None, max_length=256)
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs 'content', or 'tool_calls' in an assistant turn")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the mapping that a chat template sees: the given keys, without empty calls."""
        return {key: value for key, value in self.model_dump(mode="json").items() if value not in (None, [])}


class Sample(Wire):
    """One sample, in one of three forms.

    Exactly one of `messages`, `text` or `token_ids` (with an optional `loss_mask` of the same length).
    """

    id: Name | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    tools: tuple[JsonObject, ...] | None = Field(default=None, max_length=256)
    labels: dict[LabelName, Label | None] | None = Field(
        default=None, max_length=MAX_LABELS, description="the index gets those that the job names"
    )
    text: Text | None = None
    token_ids: tuple[TokenId, ...] | None = Field(default=None, max_length=MAX_SAMPLE_TOKENS)
    loss_mask: tuple[Literal[0, 1], ...] | None = Field(default=None, max_length=MAX_SAMPLE_TOKENS)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = [name for name in ("messages", "text", "token_ids") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError(f"give exactly one of 'messages', 'text' or 'token_ids'; got {forms or 'none'}")
        if self.loss_mask is not None:
            if self.token_ids is None:
                raise ValueError("'loss_mask' goes with 'token_ids'")
            if len(self.loss_mask) != len(self.token_ids):
                raise ValueError(
                    f"'loss_mask' has {len(self.loss_mask)} flags for {len(self.token_ids)} token ids"
                )
        if self.tools is not None and self.messages is None:
            raise ValueError("'tools' goes with 'messages'")
        return self


class Repeatable(Wire):
    """A source that may be read several times, and in shuffled order."""

    # Left out of the JSON where nothing is asked, as `ExtractRequest.part`.
    repeat: Annotated[int, Field(ge=1, le=10_000)] | Literal["forever"] = Field(
        default=1,
        exclude_if=lambda repeat: repeat == 1,
        description="passes over the rows; each is planned once all but a few units of the previous one are "
        "captured; more than one needs `storage.retention: consumed`",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        exclude_if=lambda seed: seed is None,
        description="shuffles each pass anew with a buffer of 1,000 rows; null keeps the source's order",
    )

    @property
    def is_as_it_stands(self) -> bool:
        """Whether the rows are taken once, in the source's order."""
        return self.repeat == 1 and self.seed is None


class InlineSource(Repeatable):
    """Samples in the request itself."""

    kind: Literal["inline"]
    samples: tuple[Sample, ...] = Field(min_length=1, max_length=MAX_INLINE_SAMPLES)


class FileSource(Repeatable):
    """A JSONL or Parquet file, or all files of a folder or glob in name order, under an allowed root."""

    kind: Literal["file"]
    path: Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=NO_NUL)]
    limit: int | None = Field(default=None, ge=1, le=2**63 - 1, description="take only the first rows")
    min_age_s: int = Field(
        default=0, ge=0, le=2_592_000, description="leave out files changed within this many seconds"
    )
    marker: FileSuffix | None = Field(
        default=None,
        description="take only files that have a marker file beside them, named like the file plus this "
        "suffix, such as '.done'",
    )

    @property
    def glob(self) -> tuple[Path, tuple[str, ...]]:
        """The path up to its first part with a wildcard, and that part and the others behind it."""
        parts = Path(self.path).parts
        begin = tuple(takewhile(lambda part: not WILDCARD.search(part), parts))
        return Path(*begin), parts[len(begin) :]


class HubSource(Repeatable):
    """A dataset on the Hub, streamed through `datasets`."""

    kind: Literal["hub"]
    repo_id: RepoId
    config: Name | None = None
    split: Name = "train"
    revision: Name | None = None
    limit: int | None = Field(default=None, ge=1, le=2**63 - 1, description="take only the first rows")


class PostedSource(Wire):
    """Samples posted to the schedule; only the request of a schedule may have this source."""

    kind: Literal["posted"]


class MixedSource(Wire):
    """One of several sources of a job."""

    source: Annotated[FileSource | HubSource, Field(discriminator="kind")]
    weight: float | None = Field(default=None, gt=0, le=1e6, description="its share of the rows")

    @model_validator(mode="after")
    def _as_it_stands(self) -> Self:
        if not self.source.is_as_it_stands:
            raise ValueError("give 'repeat' and 'seed' to the mix, not to one of its sources")
        return self


class MixSource(Repeatable):
    """Several sources: one after another, or interleaved by their weights until one of them ends."""

    kind: Literal["mix"]
    sources: tuple[MixedSource, ...] = Field(min_length=1, max_length=64)

    @model_validator(mode="after")
    def _all_weighed_or_none(self) -> Self:
        if len({part.weight is None for part in self.sources}) > 1:
            raise ValueError("give every source a 'weight', or none")
        return self


Source = Annotated[
    InlineSource | FileSource | HubSource | MixSource | PostedSource, Field(discriminator="kind")
]


class SourceKind(OpenEnum):
    """The `kind` of a source."""

    INLINE = "inline"
    FILE = "file"
    HUB = "hub"
    MIX = "mix"
    POSTED = "posted"
