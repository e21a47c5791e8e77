"""The interface of an engine: what it can serve, its requests and its answers.

vLLM implements it, and so does the tests' engine.

Durability is not part of an answer: it comes over the link, from the connector (`service.capture.link`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from connector.wire import RowRef
from schemas.identity import EngineInfo
from schemas.request import Dtype, Generate
from service.capture.link import EngineLink
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything of a job that an engine is started for. A running engine serves a job if `covers` says so.

    `max_model_len` counts tokens, the sampled one included. `decode` asks for rightly captured decode steps.
    """

    weights: Path
    revision: str
    dtype: Dtype
    layer_ids: tuple[int, ...]
    hidden_size: int
    max_model_len: int
    decode: bool

    def covers(self, other: "EngineSpec") -> bool:
        """Say whether an engine started for this spec can serve `other` as well."""
        same = replace(other, max_model_len=self.max_model_len, decode=self.decode) == self
        return same and self.max_model_len >= other.max_model_len and (self.decode or not other.decode)


WITNESS_TOKENS = 16
"""Enough to distinguish even rows that end in the same words, as chats do. vLLM gives 20 at most."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. `ref` names the row whose states are captured; without it nothing is.

    `generate` asks for an answer.

    `witness` asks for the `WITNESS_TOKENS` tokens that the engine holds most likely after the last token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    ref: RowRef | None
    witness: bool = False
    generate: Generate | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The sampled tokens, and for a witness, the most likely tokens after the last token with a state.

    Each of those has its log-probability; the most likely is first.
    """

    token_ids: tuple[int, ...]
    likely: tuple[tuple[int, float], ...] = ()


class PromptRefused(ValueError):
    """The engine will not take this prompt; the sample is rejected by this message and the unit goes on."""


class Engine(Protocol):
    """One engine at a time; `start` and `stop` bracket its life. Used from one event loop."""

    info: EngineInfo
    """Valid after `start`."""

    @property
    def alive(self) -> bool:
        """Say whether requests can still be answered; an engine that died stays dead."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        """Start and wait until every rank's connector has connected. Raises EngineRefused, EngineDied."""

    async def run(self, prompt: Prompt) -> Answer:
        """Run one request. Cancelling the awaiting task aborts it.

        Raises PromptRefused, EngineRefused, EngineDied.
        """

    async def stop(self) -> None:
        """Stop; nothing captured but not receipted survives. Harmless when not started."""
