"""How the target answers the prompts of a job: which turns, how they are sampled, and what ends them."""

import hashlib
from itertools import accumulate
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.base import Wire
from schemas.digest import canonical_json
from schemas.source import JsonObject, Name

MAX_KWARGS_CHARS = 16_384
RENDER_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})
"""Variables that every rendering of a chat template sets itself."""
MAX_MIX = 64
MIX_LABEL = "mix"
"""The label that holds the `generate.mix` entry drawn for a sample."""


def _template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse names that rendering sets itself, and more than an identity should hold."""
    if taken := sorted(RENDER_VARIABLES & value.keys()):
        raise ValueError(f"{taken[0]!r} is not an option of a template: it is filled in for each sample")
    if len(canonical_json(value)) > MAX_KWARGS_CHARS:
        raise ValueError(f"more than {MAX_KWARGS_CHARS} characters as JSON")
    return value


TemplateKwargs = Annotated[JsonObject, AfterValidator(_template_kwargs)]
CapturePasses = Literal["auto", "one_pass", "second_prefill"]
Ending = Literal["keep", "cut", "reject"]
"""Keep an answer, cut the conversation before it, or reject the whole conversation."""


class Endings(Wire):
    """What to do with a conversation when an answer ends in one of these ways."""

    length: Ending = Field(default="keep", description="the answer reaches `max_tokens`")
    stop: Ending = Field(default="keep", description="the answer ends at a `stop` string")
    empty: Ending = Field(default="keep", description="the answer is empty or only white space")
    repeats: Ending = Field(default="cut", description="`repeats` ends the answer")
    other_tool: Literal["cut", "reject"] = Field(
        default="cut",
        description="the answer does not call the tools whose results come next in the source; `cut` keeps "
        "this answer",
    )


class Repeats(Wire):
    """Ends an answer whose last tokens repeat themselves, with vLLM's `repetition_detection`."""

    pattern: int = Field(ge=1, le=1024, description="longest pattern to look for, in tokens")
    times: int = Field(ge=2, le=1024, description="consecutive repetitions that end the answer")


class MixEntry(Wire):
    """One of several ways to answer; null fields keep the values of `generate`."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    weight: float = Field(gt=0, le=1e6)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1, le=131_072)
    chat_template_kwargs: TemplateKwargs = Field(default={}, description="added to those of the request")


class Generate(Wire):
    """The target answers each prompt; the prompt and its answer are captured.

    With `turns: all` it answers every user turn of a conversation, with its own earlier answers as context.
    If the template renders answers verbatim, the prompt and all answers are one row. If it does not (it drops
    reasoning, trims text or rewrites tool calls), each turn is a row of its own, with the prompt as a server
    would render it.

    `capture`: `one_pass` takes the states of the decode steps themselves; the last sampled token was never
    an input, so it has no state and is not stored. `second_prefill` runs prompt and answer again on the
    prefix cache, so it covers every token. A `stop` string is found outside the engine, which drops the
    request and its states, so it needs the second prefill; so does an answer that may not be kept. `auto`
    uses `one_pass` wherever it is correct.
    """

    # Left out of the JSON where nothing is asked, as `ExtractRequest.part`.
    turns: Literal["last", "all"] = Field(
        default="last",
        exclude_if=lambda turns: turns == "last",
        description="which turns of the assistant to generate",
    )
    max_tokens: int = Field(ge=1, le=131_072, description="limit for one answer")
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=1_000_000, description="0 keeps every token")
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...] = Field(
        default=(), max_length=16
    )
    mix: tuple[MixEntry, ...] = Field(
        default=(),
        max_length=MAX_MIX,
        exclude_if=lambda mix: not mix,
        description="each sample gets one entry, drawn by its id and the weights; `label_mix` names it",
    )
    endings: Endings = Field(default=Endings(), exclude_if=lambda endings: endings == Endings())
    repeats: Repeats | None = Field(default=None, exclude_if=lambda repeats: repeats is None)
    drift: Literal["keep", "rerender", "reject"] = Field(
        default="keep",
        exclude_if=lambda drift: drift == "keep",
        description="what to do with rows whose text gives other tokens when rendered and tokenized again: "
        "keep the sampled tokens, capture the rendered ones, or reject the row",
    )
    tool_parser: Name | None = Field(
        default=None, exclude_if=lambda name: name is None, description="vLLM's `--tool-call-parser`"
    )
    reasoning_parser: Name | None = Field(
        default=None, exclude_if=lambda name: name is None, description="vLLM's `--reasoning-parser`"
    )
    capture: CapturePasses = "auto"

    @model_validator(mode="after")
    def _answers_in_one_pass_are_kept(self) -> Self:
        if self.capture == "one_pass" and self.stop:
            raise ValueError(
                "'stop' strings drop an answer before its states are read in 'one_pass'; "
                "say 'capture': 'second_prefill' or 'auto'"
            )
        if self.capture == "one_pass" and not self.keeps_answers:
            raise ValueError(
                "an answer that 'endings', 'drift' or a parser may drop cannot be captured in 'one_pass'; "
                "say 'capture': 'second_prefill' or 'auto'"
            )
        if len({entry.name for entry in self.mix}) < len(self.mix):
            raise ValueError("'mix' names an entry twice")
        return self

    @property
    def keeps_answers(self) -> bool:
        """Whether every answer is stored as it was sampled, however it ended and whatever it calls."""
        endings = self.endings
        drops = {endings.length, endings.stop, endings.empty, *({endings.repeats} if self.repeats else ())}
        is_parsed = self.tool_parser is not None or self.reasoning_parser is not None
        return self.drift == "keep" and drops == {"keep"} and not is_parsed

    @property
    def is_rendered_again(self) -> bool:
        """Whether rows are compared with the template's rendering of their conversations."""
        return self.turns == "all" or self.drift != "keep" or self.endings.empty != "keep"

    @property
    def longest_answer(self) -> int:
        """Return the most tokens that an answer may have."""
        return max(self.max_tokens, *(entry.max_tokens or 0 for entry in self.mix), 0)

    def drawn(self, sample: str) -> MixEntry | None:
        """Return the entry of `mix` drawn for a sample by its id; none without a mix."""
        draw = int.from_bytes(hashlib.blake2b(sample.encode(), digest_size=8).digest(), "big") / 2**64
        shares = list(accumulate(entry.weight for entry in self.mix))
        ends = zip(self.mix, shares, strict=True)
        return next((entry for entry, share in ends if draw < share / shares[-1]), None)

    def of(self, name: str | None) -> "Generate":
        """Return these settings with those of a `mix` entry applied."""
        entry = next((entry for entry in self.mix if entry.name == name), None)
        if entry is None:
            return self
        given = entry.model_dump(include={"temperature", "top_p", "max_tokens"}, exclude_none=True)
        return self.model_copy(update=given)
