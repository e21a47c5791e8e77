"""Plans conversations whose assistant turns the target answers. Runs in the planning child.

The source's messages between its assistant turns are kept, in blocks; its answers are dropped. If the
template writes every answer literally, and what follows does not depend on it, the conversation is one row: a
prompt, and the tokens between two answers (segments). This is tested for each conversation by rendering it
with other answers. Otherwise each turn is a row, whose prompt is rendered once the answers before it are
known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.digest import canonical_json, canonical_sha256
from schemas.generate import Generate, MixEntry
from service.errors import OptionRefused
from service.plan.rendering import Conversation, Messages, RenderFailed
from service.plan.sources.rows import RejectedError, RejectReason
from service.plan.tokenizer import TextTokenizer
from service.plan.units import Dialogue, Tokenized

PROBES = (
    " \n after white space, before it \n ",
    "\n\t after other white space, before it\t\n",
    "",
    "<think>\nwhy\n</think>\n\nthus",
    'so</think><tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    "h\u00e9ll\u00f6 \u4e16\u754c \U0001f642",
    "<|channel|>a</thought>b[/THINK]c</reasoning>d<answer>e</answer><|message|><function=f><|python_tag|>g",
    "\n\na\r\nb\n\n\nc  d\u00a0e\\f&<>\"'`g`**h**\n```py\n#i\n```\n",
    '{"a": 1}',
    "0123456789 " * 1000,
)
"""Answers that templates are known to change. Other changes are detected while the conversation is
answered.
"""
MAX_TURNS = 512
"""Maximum turns that are answered in rows of their own: each is rendered with all turns before it."""


@dataclass(frozen=True, slots=True)
class Block:
    """The messages of a source between two assistant turns.

    If it begins with tool results, `calls` has the (name, id) of the calls in the assistant turn before it.
    """

    messages: tuple[Mapping[str, Any], ...]
    calls: tuple[tuple[str, str | None], ...] = ()


class NotInSegments(Exception):
    """The conversation cannot be one row; the text says why."""


def blocks_of(messages: Messages) -> list[Block]:
    """Split a source's messages at its assistant turns. Raises RejectedError."""
    if messages[0]["role"] == "assistant":
        raise RejectedError(RejectReason.NO_PROMPT, "nothing comes before the first assistant's turn")
    blocks: list[Block] = []
    calls: list[tuple[str, str | None]] = []
    for is_asked, group in groupby(messages, key=lambda message: message["role"] != "assistant"):
        block = tuple(group)
        if is_asked:
            results = [place for place, message in enumerate(block) if message["role"] == "tool"]
            if results != list(range(len(results))) or len(results) > len(calls):
                detail = "a result of a tool follows no call of the source: give calls as 'tool_calls'"
                raise RejectedError(RejectReason.BAD_TOOL_CALL, detail)
            blocks.append(Block(block, tuple(calls) if block[0]["role"] == "tool" else ()))
        else:
            calls = [_called(call) for message in block for call in message.get("tool_calls") or ()]
    return blocks


def _called(call: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the name and the id of a call. Raises RejectedError."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise RejectedError(RejectReason.BAD_TOOL_CALL, "a call of the source names no function")
    call_id = call.get("id")
    return str(function.get("name")), None if call_id is None else str(call_id)


def plan_dialogue(
    chat: Conversation, texts: TextTokenizer, most_tokens: int, generate: Generate, entry: MixEntry | None
) -> list[Tokenized]:
    """Return the rows of a conversation: one with its segments, or one per turn; masks are all zero.

    Turns whose prompt alone leaves no room within `most_tokens` are not planned, except the first.

    Raises RejectedError, OptionRefused (`generate.tool_parser`), UnicodeEncodeError.
    """
    if generate.turns == "last":
        # The source's earlier answers stay: only the last answer is the target's.
        place = len(chat.messages) - (chat.messages[-1]["role"] == "assistant")
        blocks = [Block(tuple(chat.messages[:place]))]
        if not place:
            raise RejectedError(RejectReason.NO_PROMPT, "nothing comes before the assistant's turn")
    else:
        blocks = blocks_of(chat.messages)
    if generate.tool_parser is None and any(block.calls for block in blocks):
        detail = "the source has results of tools, and nothing says how the target calls them"
        cure = "name vLLM's `--tool-call-parser` of the model, or take conversations without tools"
        raise OptionRefused(detail, field="generate.tool_parser", cure=cure)
    plan = _Plan(chat, blocks, texts, most_tokens, generate, entry)
    try:
        return [plan.in_one_row()]
    except NotInSegments as error:
        return plan.a_row_a_turn(str(error))


def without_turns(prompt: Tokenized, generate: Generate) -> Tokenized:
    """Return the row of a prompt that is not a conversation."""
    return replace(prompt, dialogue=Dialogue("", 0, len(prompt.ids) + generate.longest_answer, ()))


class _Plan:
    """Renders one conversation with stand-ins for its answers."""

    def __init__(
        self,
        chat: Conversation,
        blocks: Sequence[Block],
        texts: TextTokenizer,
        most_tokens: int,
        generate: Generate,
        entry: MixEntry | None,
    ) -> None:
        self._chat, self._blocks, self._generate = chat, blocks, generate
        self._texts, self._most_tokens = texts, most_tokens
        self._answer_tokens = generate.of(entry.name if entry else None).max_tokens
        self._words = [f"QuarryStandIn{turn}X" for turn in range(len(blocks))]
        self._said = [[list(block.messages), list(block.calls)] for block in blocks]
        self._digest = canonical_sha256([self._said, chat.tools, entry and entry.name])

    def in_one_row(self) -> Tokenized:
        """Return the conversation as one row. Raises NotInSegments, RejectedError."""
        parses_calls = self._generate.tool_parser is not None and self._chat.tools is not None
        parses_calls = parses_calls or any(block.calls for block in self._blocks)
        if len(self._blocks) > 1 and (self._generate.reasoning_parser or parses_calls):
            raise NotInSegments("a parser reads reasoning and calls, which the template writes anew")
        if len(self._blocks) > 1 and self._generate.stop:
            raise NotInSegments("stop strings are no part of an answer's text")
        texts = self._segment_texts()
        ends = {2, len(texts)} if len(texts) > 1 else ()
        for probe, end in product((*PROBES, "".join(self._texts.marks)), ends):
            try:
                is_literal = self._prompt([probe] * (end - 1)) == probe.join(texts[:end])
            except RenderFailed as error:
                raise NotInSegments("the template fails on some answers") from error
            if not is_literal:
                raise NotInSegments("the template does not write every answer as it is given")
        ids = [self._texts.ids(text) for text in texts]
        self._check_tokens(texts, ids)
        rest = tuple(segment.astype(np.int32) for segment in ids[1:])
        longest = sum(map(len, ids)) + len(ids) * self._answer_tokens
        return self._row(ids[0], 0, self._said[: len(ids)], longest, len(self._blocks) - len(ids), rest)

    def _segment_texts(self) -> list[str]:
        """Return the prompt, then the text between each two answers."""
        texts, whole = [self._prompt([])], self._prompt([])
        num_tokens = len(self._texts.ids(whole))
        for turn, word in enumerate(self._words[:-1], 1):
            upto = whole + word
            whole = self._prompt(self._words[:turn])
            if not whole.startswith(upto):
                raise NotInSegments("a prompt does not begin with the turns before it")
            num_tokens += len(self._texts.ids(whole[len(upto) :]))
            if num_tokens >= self._most_tokens:
                break  # neither this turn nor a later one can have an answer
            texts.append(whole[len(upto) :])
        return texts

    def _check_tokens(self, texts: Sequence[str], ids: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raise NotInSegments unless each segment has the same tokens alone as in the whole conversation."""
        for text in texts[1:]:
            if not any(text.startswith(mark) for mark in self._texts.marks):
                raise NotInSegments("no added token follows an answer")
        said = [text + word for text, word in zip(texts[:-1], self._words, strict=False)]
        apart = [self._texts.ids(text) for text in said]
        whole = "".join([*said, texts[-1]])
        if not np.array_equal(self._texts.ids(whole), np.concatenate([*apart, ids[-1]])):
            raise NotInSegments("a turn has other tokens by itself than in its conversation")

    def a_row_a_turn(self, why: str) -> list[Tokenized]:
        """Return a row for each turn. Raises RejectedError."""
        first = self._texts.ids(self._prompt([]))
        marks = list(self._texts.marks.values())
        fit: list[tuple[npt.NDArray[np.int64], int]] = []
        for turn in range(1, len(self._blocks) + 1):
            prompt = self._texts.ids(self._prompt("x" * (turn - 1)))
            if turn > 1 and len(prompt) >= self._most_tokens:
                break
            if turn > MAX_TURNS:
                detail = f"more than {MAX_TURNS} turns, of which each is a row: {why}"
                raise RejectedError(RejectReason.TOO_LONG, detail)
            # For a later turn, only the part that no answer can change is certain: up to the last mark that
            # it shares with the first prompt.
            shorter = min(len(first), len(prompt))
            differs = np.flatnonzero(first[:shorter] != prompt[:shorter])
            same = int(differs[0]) if len(differs) else shorter
            ends = np.flatnonzero(np.isin(first[:same], marks))
            certain = first if turn == 1 else first[: ends[-1] + 1 if len(ends) else min(same, 1)]
            if not len(certain):
                detail = "the prompts of two turns begin differently"
                raise RejectedError(RejectReason.TURN_BOUNDARIES, detail)
            fit.append((certain, len(prompt) + turn * self._answer_tokens))
        left = len(self._blocks) - len(fit)
        return [
            self._row(ids, turn, self._said[turn - 1 : turn], longest, left, why=why)
            for turn, (ids, longest) in enumerate(fit, 1)
        ]

    def _row(
        self,
        ids: npt.NDArray[np.int64],
        turn: int,
        blocks: Sequence[object],
        longest: int,
        left: int,
        segments: tuple[npt.NDArray[np.int32], ...] = (),
        why: str = "",
    ) -> Tokenized:
        document = {
            "blocks": blocks,
            "limit": self._most_tokens,
            "left": left,
            "tools": self._chat.tools if turn <= 1 else None,
            # Makes a turn's sample distinct from those of other conversations.
            "conversation": self._digest,
        }
        most = min(longest, self._most_tokens)
        dialogue = Dialogue(canonical_json(document), turn, most, segments, why)
        return Tokenized(ids.astype(np.int32), np.zeros(len(ids), np.uint8), dialogue)

    def _prompt(self, answers: Sequence[str]) -> str:
        """Render the prompt of the turn after these answers."""
        messages = list(self._blocks[0].messages)
        for answer, block in zip(answers, self._blocks[1:], strict=False):
            calls = [
                {"type": "function", "id": call_id, "function": {"name": name, "arguments": {}}}
                for name, call_id in block.calls
            ]
            said = {"role": "assistant", "content": answer} | ({"tool_calls": calls} if calls else {})
            messages += [said, *block.messages]
        return replace(self._chat, messages=messages).prompt()
