"""Finds the assistant's turns in a rendered conversation, by rendering parts of it.

A turn begins where its prompt ends, the prompt being the conversation so far, rendered with the generation
prompt. It ends with its end-of-turn mark. Both are found by partial renderings, which must be literal
prefixes of the whole rendering.

A template may render an earlier turn differently once a later one exists: Qwen3 drops its reasoning, gpt-oss
changes its end mark. Such a turn is found by the text around it: the conversation is rendered again with a
stand-in for the turn's content, or for the arguments of its last call, and all text before the content and
after the stand-in must also be in the whole rendering.
"""

import os
from collections.abc import Collection, Sequence
from typing import Any

from service.plan.rendering import ChatTemplate, Conversation, Messages, RenderFailed, RenderTooLong
from service.plan.sources.rows import RejectedError, RejectReason

MAX_RENDERED_CHARS = 2**30
"""Maximum characters rendered to find the turns of one sample: the work is quadratic in the number of
turns.
"""

ASKING = ("user", "tool")
"""The roles that the model answers."""

Span = tuple[int, int]


class UnstableBoundaries(RejectedError):
    """The turns cannot be found in the template's rendering; the detail says which and why."""

    def __init__(self, detail: str) -> None:
        super().__init__(RejectReason.TURN_BOUNDARIES, detail)


class TurnFinder:
    """Finds assistant turns of one conversation.

    `marks` are the texts of the tokenizer's added tokens; an end-of-turn mark is one of them. `trailer` is
    what the template writes after the end mark of the last turn only, as `probe` returns it.
    """

    def __init__(self, chat: Conversation, marks: Collection[str], trailer: str = "") -> None:
        self._chat = chat
        self._messages = list(chat.messages)
        self._whole = chat.rendering.text
        self._marks = sorted(marks, key=len, reverse=True)
        self._trailer = trailer
        self._budget_chars = MAX_RENDERED_CHARS
        self._stand_in = _absent_from(self._whole)

    def span(self, turn: int) -> Span:
        """Return the characters `[start, end)` of the rendering that the model writes in `messages[turn]`.

        Raises UnstableBoundaries, RenderFailed, RenderTooLong.
        """
        last = turn == len(self._messages) - 1
        prompt = self._prompt(turn)
        upto = self._whole if last else self._render(self._messages[: turn + 1])
        upto = upto.removesuffix(self._trailer)
        if prompt is not None and upto.startswith(prompt) and self._whole.startswith(upto):
            start, end = len(prompt), len(upto)
        elif last and prompt is not None:
            fault = "the prompt that the model would answer is not how the rendering of its answer begins"
            raise UnstableBoundaries(f"{fault}: {_parting(prompt, upto)}")
        else:
            end = len(upto) if last else self._end(turn)
            start = self._start(turn) if prompt is None or not self._whole.startswith(prompt) else len(prompt)
        if start >= end:
            raise UnstableBoundaries(f"turn {turn} has no text of its own")
        return start, end

    def _prompt(self, turn: int) -> str | None:
        """Return the text that the model answers with `messages[turn]`, None if that is not known.

        Few templates render a conversation without messages, and some ask for an answer only to a question.
        Such a prompt is all up to the header that answers a question, which begins in what precedes whatever
        the turn says.
        """
        prompt = self._render(self._messages[:turn], add_generation_prompt=True) if turn else None
        if turn and self._messages[turn - 1]["role"] in ASKING:
            return prompt
        header = self._header()
        if not header or (prompt or "").endswith(header):
            return prompt
        before = os.path.commonprefix([self._closings(turn)[2], self._whole])  # noqa: RUF071 - of characters
        # Such a header may begin with the end mark of the message before, which the prompt has.
        first = max(0, len(prompt or "") - len(header) + 1)
        begin = self._whole.rfind(header, first, len(before) + len(header) - 1)
        if begin >= 0:
            return self._whole[: begin + len(header)]
        return prompt if prompt == before else None  # the header may open reasoning that is dropped

    def _header(self) -> str:
        """Return what a prompt has behind a question."""
        question = self._render(PROBE[:1])
        return self._render(PROBE[:1], add_generation_prompt=True).removeprefix(question)

    def trailer(self) -> str:
        """Return what follows the end mark of the last turn but not that of the first answer."""
        closing, after = self._closings(1)[:2]
        mark = self._mark_of(after)
        has_more = mark and closing.startswith(mark) and not after.startswith(closing)
        extra = closing[len(mark) :] if has_more else ""
        return extra if extra.strip() else ""

    def _start(self, turn: int) -> int:
        """Find the start of the turn by how a prompt ends behind its last message, if it asks for an answer.

        If the turn begins otherwise, find it by the text before a stand-in for its content.
        """
        start = self._start_behind(turn) if turn else None
        if start is not None:
            if self._messages[turn - 1]["role"] in ASKING:
                return start
            header = self._header()
            if header and self._whole[:start].endswith(header):
                return start
        try:
            before = self._closings(turn)[2]
        except RenderFailed:
            if start is None:
                raise
            return start
        if not self._whole.startswith(before):
            raise UnstableBoundaries(f"the text before turn {turn} depends on what it says")
        return len(before)

    def _start_behind(self, turn: int) -> int | None:
        """Return where a prompt ends, by what it has behind its last message, if the turn begins so."""
        asked = [*self._messages[: turn - 1], {**self._messages[turn - 1], "content": self._stand_in}]
        try:
            tail = self._split(self._render(asked, add_generation_prompt=True))[1]
            after = self._split(self._render([*asked, *self._messages[turn:]]))[1]
        except (RenderFailed, UnstableBoundaries):
            return None
        if not after.startswith(tail) or not self._whole.endswith(after):
            return None
        return len(self._whole) - len(after) + len(tail)

    def _end(self, turn: int) -> int:
        """Find the end of the turn behind its calls, or behind its content if the template refuses others.

        It may also write the last turn's calls in another form. No other message may be before the end.
        """
        calls = self._messages[turn].get("tool_calls")
        try:
            return self._end_behind(turn, calls)
        except (UnstableBoundaries, RenderFailed):
            end = self._end_behind(turn)  # fails again if there are no calls
            others = [
                message if message["role"] == "assistant" else {**message, "content": self._stand_in}
                for message in self._messages[turn + 1 :]
            ]
            if not self._render([*self._messages[: turn + 1], *others]).startswith(self._whole[:end]):
                raise
            return end

    def _end_behind(self, turn: int, calls: Sequence[Any] | None = None) -> int:
        """Find the end of the turn by the text after it in a rendering with a stand-in for its last words."""
        closing, after = self._closings(turn, calls)[:2]
        closing, mark = closing.removesuffix(self._trailer), self._mark_of(after)
        if after.startswith(closing):
            rest = after[len(closing) :]
        elif not calls and mark and (closing.startswith(mark) or closing.rstrip() == self._mark_of(closing)):
            # The last turn ends with more text than an earlier one, or with a different mark, or only it
            # ends with one. Behind arguments a mark may be their own, such as Gemma 4's quotation mark.
            rest = after if self._has_no_mark(turn, closing) else after[len(mark) :]
        else:
            fault = f"the last turn is closed by {closing[:80]!r}, which an earlier turn is not"
            raise UnstableBoundaries(fault)
        if not self._whole.endswith(rest):
            raise UnstableBoundaries(f"the text after turn {turn} depends on what it says")
        return len(self._whole) - len(rest)

    def _has_no_mark(self, turn: int, closing: str) -> bool:
        """Return whether a mark after the turn begins what follows: a prompt and a question then differ."""
        said = [*self._messages[:turn], {"role": "assistant", "content": self._stand_in}]
        try:
            prompt = self._split(self._render(said, add_generation_prompt=True))[1]
            question = self._split(self._render([*said, PROBE[0]]))[1]
        except (RenderFailed, UnstableBoundaries):
            return False
        begins = {self._mark_of(prompt), self._mark_of(question)}
        return len(begins) > 1 and begins.isdisjoint({"", self._mark_of(closing)})

    def _closings(self, turn: int, calls: Sequence[Any] | None = None) -> tuple[str, str, str]:
        """Return what follows the stand-in as the last turn, and what follows and precedes it in place.

        It stands for the arguments of the last of `calls`, or for the content if there are none: a template
        may write the results of calls only, or refuse other ones.
        """
        said: dict[str, Any] = {"role": "assistant", "content": self._stand_in}
        if calls:
            function, held = calls[-1].get("function"), {"arguments": {"it": self._stand_in}}
            last = calls[-1] | ({"function": function | held} if isinstance(function, dict) else held)
            said = {**self._messages[turn], "tool_calls": [*calls[:-1], last]}
        messages = [*self._messages[:turn], said]
        _, closing = self._split(self._render(messages))
        before, after = self._split(self._render([*messages, *self._messages[turn + 1 :]]))
        return closing, after, before

    def _split(self, rendered: str) -> tuple[str, str]:
        before, _, after = rendered.partition(self._stand_in)
        if rendered.count(self._stand_in) != 1:
            raise UnstableBoundaries("the template does not write an assistant's content exactly once")
        return before, after

    def _mark_of(self, text: str) -> str:
        return next((mark for mark in self._marks if text.startswith(mark)), "")

    def _render(self, messages: Sequence[Any], *, add_generation_prompt: bool = False) -> str:
        chat = self._chat
        text = chat.template.render(messages, chat.tools, add_generation_prompt=add_generation_prompt).text
        self._budget_chars -= len(text)
        if self._budget_chars < 0:
            raise RenderTooLong("the conversation has too many turns for its length")
        return text


def _absent_from(text: str) -> str:
    """Return a word that is not in `text`; only letters, so that no template trims or escapes it."""
    word = "QuarryStandIn"
    while word in text:
        word += "X"
    return word


def _parting(prompt: str, answer: str) -> str:
    """Quote both texts from a little before their first difference."""
    place = len(os.path.commonprefix([prompt, answer]))  # noqa: RUF071 - of characters, not of paths
    begin = max(0, place - 20)
    return f"{prompt[begin : place + 40]!r} is not {answer[begin : place + 40]!r}"


PROBE: Messages = (
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
)
"""A plain conversation: a template that fails on it is refused before any sample."""

REASONED: Messages = tuple(
    {**message, "reasoning_content": "a thought"} if message["role"] == "assistant" else message
    for message in PROBE
)
"""The same with reasoning: some templates have stable boundaries only with it."""


def probe(template: ChatTemplate, marks: Collection[str]) -> str:
    """Check a template on two exchanges, plain or with reasoning; return its trailer (see `TurnFinder`).

    Raises UnstableBoundaries, RenderFailed, RenderTooLong.
    """
    try:
        return _checked(template, PROBE, marks)
    except UnstableBoundaries as plain:
        try:
            return _checked(template, REASONED, marks)
        except (UnstableBoundaries, RenderFailed):
            raise plain from None


def _checked(template: ChatTemplate, messages: Messages, marks: Collection[str]) -> str:
    chat = Conversation(template, messages)
    trailer = TurnFinder(chat, marks).trailer()
    finder = TurnFinder(chat, marks, trailer)
    for turn in (1, 3):
        start, end = finder.span(turn)
        span = chat.rendering.text[start:end]
        answer, question = messages[turn]["content"], messages[turn - 1]["content"]
        if span.count(answer) != 1 or question in span:
            raise UnstableBoundaries(f"the span found for {answer!r} is {span[:80]!r}")
    return trailer
