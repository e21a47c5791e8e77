"""The interface of an engine: what it can serve, its requests and its answers.

vLLM implements it, and so does the tests' engine.

Durability is not part of an answer: it comes over the link, from the connector (`service.capture.link`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from connector.wire import RowRef
from schemas.generate import Generate
from schemas.identity import EngineInfo, Identity
from schemas.request import Dtype
from service.capture.link import EngineLink
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is started for, and so what it holds.

    `model_sha256` is the identity's digest of the model whose `weights` are loaded. `max_model_len` counts
    tokens, the sampled one included; `longest_model_len` is the most that the model allows. `decode` asks
    for rightly captured decode steps.
    """

    weights: Path
    model_sha256: str
    dtype: Dtype
    layer_ids: tuple[int, ...]
    hidden_size: int
    max_model_len: int
    decode: bool
    longest_model_len: int | None = None

    def serves(self, identity: Identity) -> bool:
        """Say whether a running engine of this spec captures the states that `identity` asks for.

        By what was loaded, whatever lies in the model's folder by now.
        """
        held = (self.model_sha256, self.dtype, self.layer_ids)
        asked = (identity.model_sha256(), identity.dtype, identity.layer_ids)
        fits = self.max_model_len > identity.max_tokens or self.max_model_len == self.longest_model_len
        return held == asked and fits and (self.decode or identity.generate is None)


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


Ended = Literal["end", "stop", "length", "repeats"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The sampled tokens, and for a witness, the most likely tokens after the last token with a state.

    Each of those has its log-probability; the most likely is first. `ended` says by what: a token that ends
    a turn, which is the last of `token_ids`; a `stop` string; the most tokens that were asked for; or
    `generate.repeats`.
    """

    token_ids: tuple[int, ...]
    likely: tuple[tuple[int, float], ...] = ()
    ended: Ended = "length"


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
