"""The interface of an engine: its spec, requests and answers.

It is implemented with vLLM and by the tests' fake engine.

An answer says nothing about durability: the connector reports that over the link (`service.capture.link`).
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
    """What an engine is started for, and thus what it has loaded.

    `model_sha256` is the identity's digest of the model whose `weights` are loaded. `max_model_len` is in
    tokens and includes the sampled one; `longest_model_len` is the model's own maximum. `decode` means that
    decode steps must be captured correctly.
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
        """Return whether a running engine with this spec captures the states that `identity` asks for.

        This depends on what was loaded, whatever is in the model's folder by now.
        """
        held = (self.model_sha256, self.dtype, self.layer_ids)
        asked = (identity.model_sha256(), identity.dtype, identity.layer_ids)
        fits = self.max_model_len > identity.max_tokens or self.max_model_len == self.longest_model_len
        return held == asked and fits and (self.decode or identity.generate is None)


SOCKET_PATH_BYTES = 107
"""Maximum length of a socket's path on Linux."""
SHORT_TMPDIR = "name a folder with room and a short path in TMPDIR"
"""What to do if the engine's sockets cannot be made."""

WITNESS_TOKENS = 16
"""Enough to distinguish even rows that end in the same words, as chats do. vLLM returns at most 20."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. `ref` names the row whose states are captured; without it, nothing is captured.

    `generate` requests an answer.

    `witness` requests the `WITNESS_TOKENS` tokens that the engine finds most likely after the last token.

    Unless it `reads_cache`, every token is computed, also those that the engine's prefix cache holds.
    """

    request_id: str
    token_ids: tuple[int, ...]
    ref: RowRef | None
    witness: bool = False
    generate: Generate | None = None
    reads_cache: bool = True


Ended = Literal["end", "stop", "length", "repeats"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The sampled tokens and, for a witness, the most likely tokens after the last token that has a state.

    `likely` is (token, log-probability), most likely first. `ended` is how the answer ended: "end", by a
    token that ends a turn, which is the last of `token_ids`; "stop", by a `stop` string; "length", by the
    maximum number of tokens; or "repeats", by `generate.repeats`.
    """

    token_ids: tuple[int, ...]
    likely: tuple[tuple[int, float], ...]
    ended: Ended


class PromptRefused(ValueError):
    """The engine refuses this prompt; the sample is rejected with this message and the unit continues."""


class Engine(Protocol):
    """One engine at a time; `start` and `stop` bracket its life. Used from one event loop."""

    info: EngineInfo
    """Valid after `start`."""

    @property
    def alive(self) -> bool:
        """Return whether requests can still be answered; an engine that died stays dead."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        """Start and wait until every rank's connector has connected. Raises EngineRefused, EngineDied."""

    async def run(self, prompt: Prompt) -> Answer:
        """Run one request. Cancelling the awaiting task aborts it.

        Raises PromptRefused, EngineRefused, EngineDied.
        """

    async def stop(self) -> None:
        """Stop; what was captured without a receipt is lost. Harmless if not started."""
