"""Lets the target answer the prompts of one unit, turn by turn, and captures the resulting rows.

A row is captured by its last request: in one pass by the answer itself, otherwise by a prefill of the whole
row. Earlier requests leave their states in the prefix cache.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from connector.wire import RowRef
from schemas.dataset.columns import LABEL_PREFIX
from schemas.dataset.index import Witness
from schemas.generate import MIX_LABEL, Ending, Generate
from schemas.receipts import AttemptId
from service.capture.engine import Answer, Engine, Prompt, PromptRefused
from service.capture.renderer import Message, ParsedAnswer, Renderer, Talk
from service.plan.sources.rows import RejectedError, RejectReason
from service.proof.checks import Written
from service.store import UnitLease

CONTEXT = 8
"""How many tokens before an answer are needed to decode its first tokens."""
SEVERITY: tuple[Ending, ...] = ("keep", "cut", "reject")


class ConversationRejected(RejectedError):
    """No turn of a conversation is kept."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A row of the plan, expected to reach at most about `most_tokens`, and never more than `limit`.

    `blocks` has, for each answer, the messages before it and the (name, id) of the calls whose results they
    begin with. `entry` is the row's `mix` entry; `left` means that some turns of the source were not planned.
    """

    number: int
    prompt: list[int]
    segments: list[list[int]]
    is_turn: bool
    entry: str | None
    most_tokens: int
    limit: int
    blocks: list[tuple[list[Message], list[tuple[str, str | None]]]]
    tools: list[Message] | None
    left: bool

    @classmethod
    def of(cls, plan: pa.Table, number: int, generate: Generate) -> "Planned":
        """Read row `number`; a plan without dialogues has fewer columns."""

        def value(column: str, absent: Any) -> Any:  # noqa: ANN401 - what the plan holds
            return plan[column][number].as_py() if column in plan.column_names else absent

        document = json.loads(value("document", "") or "{}")
        prompt, entry = value("input_ids", []), value(f"{LABEL_PREFIX}{MIX_LABEL}", None)
        most_tokens = value("most_tokens", len(prompt) + generate.of(entry).max_tokens)
        return cls(
            number=number,
            prompt=prompt,
            segments=value("segments", []),
            is_turn=value("turn", 0) > 0,
            entry=entry,
            most_tokens=most_tokens,
            limit=document.get("limit", most_tokens),
            blocks=document.get("blocks", []),
            tools=document.get("tools"),
            left=bool(document.get("left")),
        )


@dataclass(slots=True)
class Row:
    """A growing row: token ids and loss mask, which begin with the plan's prompt.

    `has_end` is true if the last token ends a turn, `is_captured` if the engine captures the row's states.
    """

    planned: Planned
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    has_end: bool = False
    is_captured: bool = False
    ends: tuple[tuple[int | None, ...], ...] = ()
    """For each answer, its last token, and the one behind it with which it ended itself, or None."""

    def prompt(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the target did not generate."""
        if self.has_end:
            if self.ids[-1] == token_ids[0]:
                token_ids = token_ids[1:]  # already generated
            else:
                del self.ids[-1], self.mask[-1]  # the template ends a turn differently
        self.ids += token_ids
        self.mask += [0] * len(token_ids)
        self.has_end = False

    def answer(self, answer: Answer) -> None:
        """Append the target's answer."""
        self.ids += answer.token_ids
        self.mask += [1] * len(answer.token_ids)
        self.has_end = answer.ended == "end"
        said = (None, *answer.token_ids) if self.has_end else (*answer.token_ids, None)
        self.ends = (*self.ends, said[-2:])

    def runs(self) -> tuple[int, ...]:
        """Return the lengths of the runs after the planned tokens, as in `RowRef`, if an answer is next."""
        mask = self.mask[len(self.planned.prompt) :]
        edges = np.flatnonzero(np.diff([0, *mask]))
        runs = tuple(np.diff([0, *edges, len(mask)]).tolist())
        return runs if len(runs) % 2 else (*runs, 0)

    def written(self) -> Written:
        """Return the row as it must be stored."""
        prompt_tokens = int(np.append(self.mask, 1).argmax())
        return Written(np.asarray(self.ids, np.int32), np.asarray(self.mask, np.uint8), prompt_tokens)


def row_name(attempt_id: AttemptId, number: int) -> str:
    """Return the name of the request that captures a row."""
    return f"{attempt_id.job_id}-{attempt_id.unit}-{attempt_id.epoch}-{number}"


class Answering:
    """Answers the rows of one attempt at a unit.

    By plan row, `written` is what must be stored and `rejects` says why a row is left out. `last_answers` has
    the place of the last answer's first token, unless a prefill captured the row although the job is captured
    in one pass, because the context was nearly full. `counts` counts events of answers and conversations.
    """

    def __init__(
        self,
        lease: UnitLease,
        plan: pa.Table,
        engine: Engine,
        renderer: Renderer | None,
        on_answer: Callable[[], None],
    ) -> None:
        """Store the arguments; with a `renderer`, rows are checked against their conversations."""
        identity, self._attempt_id = lease.identity, lease.attempt_id
        assert identity.generate is not None, "the job lets the target answer"  # noqa: S101
        self._plan, self._engine, self._renderer = plan, engine, renderer
        self._generate, self._in_one_pass = identity.generate, identity.capture == "one_pass"
        self._on_answer = on_answer
        self.counts: Counter[str] = Counter()
        self.written: dict[int, Written] = {}
        self.last_answers: dict[int, int] = {}
        self.witnesses: dict[int, Witness] = {}
        self.rejects: dict[int, tuple[str, str]] = {}

    def planned(self, rows: Sequence[int]) -> list[Planned]:
        """Read rows of the plan."""
        return [Planned.of(self._plan, row, self._generate) for row in rows]

    async def run(self, planned: Sequence[Planned]) -> None:
        """Answer one conversation; it has several rows if each turn is a row of its own.

        Raises what the engine and the renderer raise.
        """
        rows = [row.number for row in planned]
        try:
            if planned[0].is_turn:
                await self._answer_turns(planned)
            else:
                await self._answer_whole(planned[0])
        except ConversationRejected as error:
            self._leave_out(rows, error)
        except PromptRefused as error:  # raised while a row was captured
            self._leave_out([row for row in rows if row not in self.written], error)

    async def _answer_whole(self, planned: Planned) -> None:
        """Answer all turns in one row; a conversation that ends early keeps the turns before that."""
        talk, blocks = Talk(planned.tools, planned.entry), planned.blocks
        segments = [planned.prompt, *planned.segments]
        row = Row(planned)
        kept: tuple[Row, list[Message]] | None = None
        try:
            for turn, segment in enumerate(segments):
                row.prompt(segment)
                captures = turn == len(segments) - 1
                talk.messages += blocks[turn][0] if blocks else []
                await self._check_literal(row, talk, turn)
                parsed = await self._answer(turn, row, talk, captures=captures)
                talk.messages += [parsed.message] if parsed is not None and blocks else []
                kept = replace(row, ids=list(row.ids), mask=list(row.mask)), list(talk.messages)
        except ConversationRejected:
            raise
        except (RejectedError, PromptRefused) as error:
            if kept is None:
                self._leave_out([planned.number], error)
                return
        else:
            self.counts["context full"] += planned.left
        assert kept is not None  # noqa: S101
        row, talk.messages = kept
        self.counts["conversations in one row"] += len(segments) > 1
        await self._store(row, talk, last_only=self._generate.turns == "last")

    async def _answer_turns(self, turns: Sequence[Planned]) -> None:
        """Answer each turn in a row of its own; turns that are not reached are rejected."""
        talk = Talk(turns[0].tools, turns[0].entry)
        # Rows may be stored at once only if no later answer can reject the whole conversation.
        captures = self._generate.keeps_answers
        rows: list[Row] = []
        last: ParsedAnswer | None = None
        self.counts["conversations in a row a turn"] += 1
        for place, planned in enumerate(turns):
            ((block, calls),) = planned.blocks
            try:
                if last is not None:
                    self._check_goes_on(last, calls)
                talk.messages += block
                row = await self._prompted(planned, talk)
                last = await self._answer(0, row, talk, captures=captures)
                assert last is not None  # noqa: S101
                talk.messages.append(last.message)
                rows.append(row)
            except ConversationRejected:
                raise
            except (RejectedError, PromptRefused) as error:
                self._leave_out([turn.number for turn in turns[place:]], error)
                break
            if captures:
                await self._store(row, talk, last_only=True)
        self.counts["context full"] += turns[-1].left and len(rows) == len(turns)
        if not captures:
            until = [place for place, message in enumerate(talk.messages) if message["role"] == "assistant"]
            for row, end in zip(rows, until, strict=False):
                so_far = replace(talk, messages=talk.messages[: end + 1])
                await self._store(row, so_far, last_only=True)

    async def _prompted(self, planned: Planned, talk: Talk) -> Row:
        """Return a row that begins with the prompt of the next turn. Raises RejectedError."""
        assert self._renderer is not None  # noqa: S101
        prompt = (await self._renderer.prompt(talk)).tolist()
        if prompt[: len(planned.prompt)] != planned.prompt:
            detail = "the prompt does not begin as it was planned: an answer changes its beginning"
            raise RejectedError(RejectReason.TURN_BOUNDARIES, detail)
        row = Row(planned)
        row.prompt(prompt)
        return row

    async def _answer(self, turn: int, row: Row, talk: Talk, *, captures: bool) -> ParsedAnswer | None:
        """Append an answer; return what it is parsed into if there is a renderer.

        Raises RejectedError if the conversation ends before this answer, ConversationRejected.
        """
        sampling = self._generate.of(talk.entry)
        room = row.planned.limit - len(row.ids)
        if room < 1:
            raise self._ended("context full", "the context is full")
        sampling = sampling.model_copy(update={"max_tokens": min(room, sampling.max_tokens)})
        is_cut_short = sampling.max_tokens < self._generate.of(talk.entry).max_tokens
        row.is_captured = captures and self._in_one_pass and not is_cut_short
        ref = self._ref(row) if row.is_captured else None
        name = row_name(self._attempt_id, row.planned.number)
        name = name if ref is not None else f"{name}-turn-{turn}"
        prompt = Prompt(name, tuple(row.ids), ref, witness=ref is not None, generate=sampling)
        answer = await self._engine.run(prompt)
        self._on_answer()
        parsed = None
        if self._renderer is not None:
            said = answer.token_ids[:-1] if answer.ended == "end" else answer.token_ids
            is_stopped = answer.ended == "stop"
            parsed = await self._renderer.read(row.ids[-CONTEXT:], said, talk, is_stopped=is_stopped)
            if parsed.fault:
                self.counts["broken tool call"] += 1
                raise ConversationRejected(RejectReason.BROKEN_TOOL_CALL, parsed.fault)
        self._judge(answer, parsed, is_cut_short=is_cut_short)
        row.answer(answer)
        if ref is not None:
            self._captured(row, answer)
        return parsed

    def _judge(self, answer: Answer, parsed: ParsedAnswer | None, *, is_cut_short: bool) -> None:
        """Count how an answer ended. Raises RejectedError or ConversationRejected if it is not kept."""
        endings = self._generate.endings
        if answer.ended == "length" and is_cut_short:
            raise self._ended("context full", "the context is full before the answer has ended")
        chosen: dict[str, tuple[Ending, str]] = {
            "length": (endings.length, "length"),
            "stop": (endings.stop, "stop string"),
            "repeats": (endings.repeats, "repeats itself"),
        }
        happened = [chosen[answer.ended]] if answer.ended in chosen else []
        if parsed is not None and parsed.is_empty:
            happened.append((endings.empty, "empty"))
        self.counts.update(how for _, how in happened)
        ending, how = max(happened, key=lambda one: SEVERITY.index(one[0]), default=("keep", ""))
        if ending == "keep":
            return
        error = RejectedError(RejectReason.CONVERSATION_ENDED, f"an answer is not kept: {how}")
        if ending == "cut":
            raise error
        raise ConversationRejected(RejectReason.ANSWER_REJECTED, str(error))

    async def _check_literal(self, row: Row, talk: Talk, turn: int) -> None:
        """Check a later turn's prompt against what a server would render from the conversation so far.

        Different tokens for the same text are only drift. Raises RejectedError if the text differs.
        """
        if self._renderer is not None and turn and not await self._renderer.is_prompt(row.ids, talk):
            detail = (
                "the template writes an answer otherwise than it was given, or something else for its sake"
            )
            self.counts["changed by the template"] += 1
            raise RejectedError(RejectReason.TURN_BOUNDARIES, detail)

    def _check_goes_on(self, last: ParsedAnswer, calls: Sequence[tuple[str, str | None]]) -> None:
        """Check an answer's calls against those whose results the source has; give them the source's ids.

        Raises RejectedError or ConversationRejected if they differ, or if the answer's text has lost special
        tokens, so that no server would continue from it.
        """
        if last.lost:
            detail = f"the text of the answer before has no {last.lost}: name 'generate.reasoning_parser'"
            raise RejectedError(RejectReason.DRIFT, detail)
        names = tuple(name for name, _ in calls)
        if last.calls != names:
            called, known = ", ".join(last.calls) or "no tool", ", ".join(names) or "none"
            error = self._ended("another tool", f"it called {called}, and the source has results of {known}")
            if self._generate.endings.other_tool == "reject":
                raise ConversationRejected(RejectReason.ANSWER_REJECTED, str(error))
            raise error
        for call, (_, call_id) in zip(last.message.get("tool_calls", ()), calls, strict=True):
            if call_id is not None:
                call["id"] = call_id

    async def _store(self, row: Row, talk: Talk, *, last_only: bool) -> None:
        """Check a row against its conversation, and capture it if that was not done while it was answered."""
        try:
            if self._renderer is not None and talk.messages:
                row = await self._held_against(row, talk, self._renderer, last_only=last_only)
        except RejectedError as error:
            self.counts["drift"] += 1  # the template fails on the target's answer
            if not row.is_captured and self._generate.drift != "keep":
                self._leave_out([row.planned.number], error)
                return
        if not row.is_captured:
            name = row_name(self._attempt_id, row.planned.number)
            prompt = Prompt(name, tuple(row.ids), self._ref(row), witness=True)
            self._captured(row, await self._engine.run(prompt))

    async def _held_against(self, row: Row, talk: Talk, renderer: Renderer, *, last_only: bool) -> Row:
        """Return the row, or the row tokenized again if `drift` asks for that. Raises RejectedError."""
        said = np.asarray(row.ids[:-1] if row.has_end else row.ids)
        rendered = await renderer.rendered(talk, said.tolist(), row.ends, last_only=last_only)
        if rendered is None:
            return row
        ids, mask = rendered
        if row.is_captured or self._generate.drift == "keep":
            self.counts["drift"] += 1
            return row
        if mask.any():  # what the template writes behind the last answer is not a part of the row
            end = int(np.flatnonzero(mask)[-1]) + 1
            ids, mask = ids[:end], mask[:end]
        shorter = min(len(ids), len(said))
        at = int(np.append(ids[:shorter] != said[:shorter], True).argmax())
        prompt = row.planned.prompt
        fits = len(ids) <= row.planned.limit and np.array_equal(ids[: len(prompt)], prompt)
        if self._generate.drift == "reject" or not fits or mask[: len(prompt)].any():
            raise RejectedError(
                RejectReason.DRIFT, f"rendered and tokenized again it has other tokens from {at} on"
            )
        self.counts["drift"] += 1
        return Row(row.planned, ids.tolist(), mask.tolist())

    def _ref(self, row: Row) -> RowRef:
        return RowRef(self._attempt_id, row.planned.number, len(row.planned.prompt), row.runs())

    def _captured(self, row: Row, answer: Answer) -> None:
        self.written[row.planned.number] = written = row.written()
        if written.mask.any() and row.is_captured == self._in_one_pass:
            self.last_answers[row.planned.number] = written.last_answer
        if answer.likely:
            self.witnesses[row.planned.number] = answer.likely

    def _ended(self, how: str, detail: str) -> RejectedError:
        self.counts[how] += 1
        return RejectedError(RejectReason.CONVERSATION_ENDED, detail)

    def _leave_out(self, rows: Sequence[int], error: RejectedError | PromptRefused) -> None:
        why = ("engine-refused", str(error))
        if isinstance(error, RejectedError):
            why = (str(error.reject.reason), error.reject.detail)
        self.rejects |= dict.fromkeys(rows, why)
