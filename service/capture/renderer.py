"""Renders and parses conversations while the engine answers them, in a child process that may be killed.

There is one child per job. Its answers are checked, since it runs untrusted templates.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.names import is_local_model
from schemas.request import ExtractRequest
from service.errors import IdentityChanged, PlanningDied, QuarryError
from service.plan.child.process import REASONS, Child
from service.plan.child.task import Limits, Purpose, Task
from service.plan.model_folder import TOKENIZER_FILES, files_digest, locate_model, weight_roots_of
from service.plan.sources import RejectReason
from service.plan.sources.rows import RejectedError
from service.settings import Settings
from service.store import Store, UnitLease, jobs

Message = Mapping[str, Any]
PARSER_BYTES = 2**33
"""Extra address space for vLLM, whose parsers the child may import."""


@dataclass(slots=True)
class Talk:
    """A conversation so far: its messages, the job's tools for it, its `mix` entry."""

    tools: list[Message] | None
    entry: str | None
    messages: list[Message] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer parsed into a message; `fault` says what is wrong with its calls, or is empty.

    `lost` names the special tokens that are missing from its text.
    """

    message: dict[str, Any]
    fault: str
    lost: str

    @property
    def is_empty(self) -> bool:
        """Whether it has only white space, no reasoning and no calls."""
        return not (
            self.message.get("content", "").strip() or self.calls or "reasoning_content" in self.message
        )

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of the tools that it calls."""
        return tuple(call["function"]["name"] for call in self.message.get("tool_calls", ()))


class Renderer:
    """The child of one job. Its methods raise RejectedError, TemplateRefused, OptionRefused, PlanningDied."""

    def __init__(self, lease: UnitLease, request: ExtractRequest, settings: Settings) -> None:
        """Start the child and wait until it is ready. Blocks. Also raises IdentityChanged."""
        self._thread = ThreadPoolExecutor(1, "renders")
        self._error: QuarryError | None = None
        """Why the child has ended."""
        local = is_local_model(lease.model)
        located = locate_model(lease.model, None if local else lease.identity.revision, settings)
        task = Task(Purpose.TURNS, request, located, settings.model_roots, weight_roots_of(settings), None)
        memory_bytes = settings.plan_memory_bytes + PARSER_BYTES
        limits = Limits(memory_bytes, settings.plan_row_cpu_s, settings.plan_silence_s)
        self._child = Child(task, limits)
        try:
            opening = self._child.opening()
        except BaseException:
            self.close()
            raise
        tokenizer_sha256 = files_digest(located.folder, TOKENIZER_FILES)
        loaded = opening.template_sha256, tokenizer_sha256
        if loaded != (lease.identity.template_sha256, lease.identity.tokenizer_sha256):
            self.close()
            detail = "tokenizer or chat template are not those that the job was planned with"
            raise IdentityChanged(detail, field="model", cure="restore it and resume, or submit a new job")

    @property
    def has_ended(self) -> bool:
        """Whether another child must be started."""
        return self._error is not None

    async def prompt(self, talk: Talk) -> npt.NDArray[np.int32]:
        """Return the token ids, int32 `[T]`, of the prompt for the next turn."""
        (length, *_), body = await self._ask("prompt", talk.messages, talk.tools, talk.entry)
        return _ids(length, body)

    async def rendered(
        self, talk: Talk, said: Sequence[int], ends: Sequence[Sequence[int | None]], *, last_only: bool
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]] | None:
        """Return token ids and loss mask, `[T]`, of a conversation, or None if its tokens begin with `said`.

        All answers are supervised, or only the last; a mark at the end of an answer only if it is in `ends`:
        the answer's last token and its end.
        """
        conversation = talk.messages, talk.tools, talk.entry
        (length, *_), body = await self._ask("rendered", *conversation, list(said), ends, last_only)
        if length == 0:
            return None
        ids = _ids(length, body)
        mask = np.frombuffer(body, np.uint8, len(ids), 4 * len(ids))
        return ids, mask

    async def is_prompt(self, token_ids: Sequence[int], talk: Talk) -> bool:
        """Return whether the tokens decode to the prompt of the next turn."""
        conversation = talk.messages, talk.tools, talk.entry
        values, _ = await self._ask("is prompt", list(token_ids), *conversation)
        match values:
            case [bool(same)]:
                return same
        raise _unexpected(values)

    async def read(
        self, before: Sequence[int], token_ids: Sequence[int], talk: Talk, *, is_stopped: bool
    ) -> ParsedAnswer:
        """Parse an answer; `before` are the last tokens before it.

        If `is_stopped`, it ends with a `stop` string, which is removed.
        """
        said = list(before), list(token_ids)
        values, _ = await self._ask("read", *said, talk.tools, talk.entry, is_stopped)
        match values:
            case [dict(message), str(fault), str(lost)]:
                return ParsedAnswer(message, fault, lost)
        raise _unexpected(values)

    def close(self) -> None:
        """End the child."""
        self._error = self._error or PlanningDied("the renderer was closed")
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._child.close()

    async def _ask(self, kind: str, *arguments: object) -> tuple[list[Any], bytes]:
        # In a thread of its own, so that a slow template delays nobody else. A cancelled caller's question
        # stays there, and its answer is read before the next question is asked.
        asked = partial(self._asked, kind, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, asked)

    def _asked(self, kind: str, *arguments: object) -> tuple[list[Any], bytes]:
        if self._error is not None:
            raise self._error
        try:
            answer, body = self._child.ask(kind, *arguments)
        except QuarryError as error:
            self._error = error
            self._child.close()
            raise
        except OSError as error:  # closed meanwhile
            raise PlanningDied("the renderer was closed") from error
        match answer:
            case ["rejected", str(reason), str(detail)] if reason in REASONS:
                raise RejectedError(RejectReason(reason), detail)
            case [str(name), *values] if name == kind:
                return values, body
        raise _unexpected(answer)


class Renderers:
    """The renderers of the jobs whose units this worker holds."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._of_jobs: dict[str, Renderer] = {}

    async def of(self, lease: UnitLease) -> Renderer:
        """Return a job's renderer, starting it if needed. Raises as `Renderer` does, and StoreUnavailable."""
        self._of_jobs = {job_id: one for job_id, one in self._of_jobs.items() if not one.has_ended}
        if lease.job_id not in self._of_jobs:
            started = await asyncio.to_thread(self._start, lease)
            self._of_jobs.setdefault(lease.job_id, started)
            if self._of_jobs[lease.job_id] is not started:
                started.close()
        return self._of_jobs[lease.job_id]

    def _start(self, lease: UnitLease) -> Renderer:
        return Renderer(lease, self._store.read(jobs.request, lease.job_id), self._settings)

    def keep(self, job_ids: Collection[str]) -> None:
        """End the renderers of all other jobs."""
        for job_id in self._of_jobs.keys() - set(job_ids):
            self._of_jobs.pop(job_id).close()


def _ids(length: object, body: bytes) -> npt.NDArray[np.int32]:
    if not isinstance(length, int) or not 0 < 4 * length <= len(body):
        raise _unexpected(length)
    return np.frombuffer(body, "<i4", length)


def _unexpected(answer: object) -> PlanningDied:
    return PlanningDied(f"the process that renders said {answer!r:.200}", cure="look into the log")
