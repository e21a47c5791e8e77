"""Where the assistant's turns stand in a rendered conversation, found by rendering parts of it.

A turn begins where the prompt ends that the model was given for it: the conversation so far, rendered with
the generation prompt. It ends with its end-of-turn mark. Both are taken from renderings and must be literal
prefixes of the whole one.

A template may render an earlier turn differently once a later one exists (Qwen3 drops its reasoning,
gpt-oss changes its end mark). Then the turn is found by what stands around it: the conversation is rendered
again with the turn's content replaced by a stand-in, and all that comes before and after it must stand in
the whole rendering letter for letter.
"""

from collections.abc import Collection, Sequence
from typing import Any

from service.plan.rendering import ChatTemplate, Messages, RenderFailed, Tools

MAX_RENDERED_CHARS = 2**30
"""Characters that finding the turns of one sample may render: it is quadratic in the turns."""

Span = tuple[int, int]


class UnstableBoundaries(Exception):
    """The turns cannot be told apart in this template's rendering; the message says which and why."""


class RenderBudgetSpent(Exception):
    """The conversation has too many turns for its length."""


class TurnFinder:
    """Finds assistant turns of one conversation.

    `whole` is the rendering of all `messages` without a generation prompt. `marks` are the texts of the
    tokenizer's added tokens: an end-of-turn mark is one of them. `trailer` is what the template writes
    after the last turn's end mark alone, as `probe` found it.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Messages,
        tools: Tools,
        whole: str,
        marks: Collection[str],
        trailer: str = "",
    ) -> None:
        self._template = template
        self._messages = list(messages)
        self._tools = tools
        self._whole = whole
        self._marks = sorted(marks, key=len, reverse=True)
        self._trailer = trailer
        self._budget_chars = MAX_RENDERED_CHARS
        self._stand_in = _absent_from(whole)

    def span(self, turn: int) -> Span:
        """Return the characters `[start, end)` of `whole` that the model has to write in `messages[turn]`.

        Raises UnstableBoundaries, RenderBudgetSpent; RenderFailed, RenderTooLong of the template.
        """
        last = turn == len(self._messages) - 1
        prompt = self._render(self._messages[:turn], add_generation_prompt=True) if turn else None
        upto = self._whole if last else self._render(self._messages[: turn + 1])
        if prompt is not None and upto.startswith(prompt) and self._whole.startswith(upto):
            start, end = len(prompt), len(upto)
        elif last and prompt is not None:
            raise UnstableBoundaries(
                "the prompt that the model would answer is not how the rendering of its answer begins: "
                f"{_parting(prompt, upto)}"
            )
        else:
            start, end = self._surrounded(turn)
            if prompt is not None and self._whole.startswith(prompt):
                start = len(prompt)
        if last and self._whole.endswith(self._trailer):
            end = len(self._whole) - len(self._trailer)
        if start >= end:
            raise UnstableBoundaries(f"turn {turn} has no text of its own")
        return start, end

    def trailer(self, turn: int) -> str:
        """Return what closes a last turn, but not `messages[turn]`, beyond their common end mark."""
        closing, after = self._closings(turn)[:2]
        mark = self._mark_of(after)
        extra = "" if after.startswith(closing) or not closing.startswith(mark) else closing[len(mark) :]
        return extra if extra.strip() else ""

    def _surrounded(self, turn: int) -> Span:
        """Find the turn by what stands around it in a rendering with a stand-in for its content."""
        closing, after, before = self._closings(turn)
        mark = self._mark_of(after)
        if after.startswith(closing):
            rest = after[len(closing) :]
        elif mark and (closing.startswith(mark) or closing.rstrip() == self._mark_of(closing)):
            # The last turn ends with more than an earlier one, or with another mark.
            rest = after[len(mark) :]
        else:
            raise UnstableBoundaries(
                f"the last turn is closed by {closing[:80]!r}, which an earlier turn is not"
            )
        end = len(self._whole) - len(rest)
        if not (self._whole.startswith(before) and self._whole.endswith(rest) and len(before) <= end):
            raise UnstableBoundaries(f"what stands around turn {turn} depends on what it says")
        return len(before), end

    def _closings(self, turn: int) -> tuple[str, str, str]:
        """Return what follows the stand-in in the last turn, and what follows and precedes it in place."""
        plain = {"role": "assistant", "content": self._stand_in}
        closing = self._split(self._render([*self._messages[:turn], plain]))[1]
        before, after = self._split(
            self._render([*self._messages[:turn], plain, *self._messages[turn + 1 :]])
        )
        return closing, after, before

    def _split(self, rendered: str) -> tuple[str, str]:
        before, found, after = rendered.partition(self._stand_in)
        if not found or self._stand_in in after:
            raise UnstableBoundaries("the template does not write an assistant's content exactly once")
        return before, after

    def _mark_of(self, text: str) -> str:
        return next((mark for mark in self._marks if text.startswith(mark)), "")

    def _render(self, messages: Sequence[Any], *, add_generation_prompt: bool = False) -> str:
        rendered = self._template.render(
            messages, self._tools, add_generation_prompt=add_generation_prompt
        ).text
        self._budget_chars -= len(rendered)
        if self._budget_chars < 0:
            raise RenderBudgetSpent
        return rendered


def _absent_from(text: str) -> str:
    """Return a word that `text` does not hold; letters only, so that no template trims or escapes it."""
    word = "QuarryStandIn"
    while word in text:
        word += "X"
    return word


def _parting(prompt: str, answer: str) -> str:
    """Quote both texts from a little before the place where they part."""
    place = next(
        (i for i, (a, b) in enumerate(zip(prompt, answer, strict=False)) if a != b),
        min(len(prompt), len(answer)),
    )
    begin = max(0, place - 20)
    return f"{prompt[begin : place + 40]!r} is not {answer[begin : place + 40]!r}"


PROBE: Messages = (
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
)
"""A plain conversation: a template that cannot be read here is refused before any sample is."""

REASONED: Messages = tuple(
    {**message, "reasoning_content": "a thought"} if message["role"] == "assistant" else message
    for message in PROBE
)
"""The same with reasoning: some templates are stable only where there is some."""


def probe(template: ChatTemplate, marks: Collection[str]) -> str:
    """Check a template on two exchanges, plain or with reasoning; return its trailer (see `TurnFinder`).

    Raises UnstableBoundaries; RenderFailed, RenderTooLong of the template.
    """
    try:
        return _checked(template, PROBE, marks)
    except UnstableBoundaries as plain:
        try:
            return _checked(template, REASONED, marks)
        except (UnstableBoundaries, RenderFailed):
            raise plain from None


def _checked(template: ChatTemplate, messages: Messages, marks: Collection[str]) -> str:
    whole = template.render(messages, None, add_generation_prompt=False).text
    trailer = TurnFinder(template, messages, None, whole, marks).trailer(1)
    finder = TurnFinder(template, messages, None, whole, marks, trailer)
    for turn in (1, 3):
        start, end = finder.span(turn)
        said = messages[turn]["content"]
        if whole[start:end].count(said) != 1 or messages[turn - 1]["content"] in whole[start:end]:
            raise UnstableBoundaries(f"the span found for {said!r} is {whole[start:end][:80]!r}")
    return trailer
