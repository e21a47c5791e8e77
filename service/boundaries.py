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

from service.rendering import ChatTemplate, Messages, Tools

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
    tokenizer's added tokens: an end-of-turn mark is one of them.
    """

    def __init__(
        self, template: ChatTemplate, messages: Messages, tools: Tools, whole: str, marks: Collection[str]
    ) -> None:
        self._template = template
        self._messages = list(messages)
        self._tools = tools
        self._whole = whole
        self._marks = sorted(marks, key=len, reverse=True)
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
            return len(prompt), len(upto)
        if last and prompt is not None:
            raise UnstableBoundaries(
                "the prompt that the model would answer is not how the rendering of its answer begins: "
                f"{_around(prompt, upto)}"
            )
        start, end = self._surrounded(turn)
        if prompt is not None and self._whole.startswith(prompt):
            start = len(prompt)
        if start >= end:
            raise UnstableBoundaries(f"turn {turn} has no text of its own")
        return start, end

    def _surrounded(self, turn: int) -> Span:
        """Find the turn by what stands around it in a rendering with a stand-in for its content."""
        plain = {"role": "assistant", "content": self._stand_in}
        ended = self._render([*self._messages[:turn], plain])
        closing = self._split(ended)[1]
        before, after = self._split(
            self._render([*self._messages[:turn], plain, *self._messages[turn + 1 :]])
        )
        if after.startswith(closing):
            rest = after[len(closing) :]
        elif self._mark_of(after) and self._mark_of(closing) == closing.rstrip():
            # The last turn ends with one mark, an earlier turn with another one.
            rest = after[len(self._mark_of(after)) :]
        else:
            raise UnstableBoundaries(
                f"the last turn is closed by {closing[:80]!r}, which an earlier turn is not"
            )
        end = len(self._whole) - len(rest)
        if not (self._whole.startswith(before) and self._whole.endswith(rest) and len(before) <= end):
            raise UnstableBoundaries(f"what stands around turn {turn} depends on what it says")
        return len(before), end

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


def _around(prompt: str, answer: str) -> str:
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


def probe(template: ChatTemplate, marks: Collection[str]) -> None:
    """Check a template on two plain exchanges.

    Raises UnstableBoundaries; RenderFailed, RenderTooLong of the template.
    """
    whole = template.render(PROBE, None, add_generation_prompt=False).text
    finder = TurnFinder(template, PROBE, None, whole, marks)
    for turn in (1, 3):
        start, end = finder.span(turn)
        said = PROBE[turn]["content"]
        if whole[start:end].count(said) != 1 or PROBE[turn - 1]["content"] in whole[start:end]:
            raise UnstableBoundaries(f"the span found for {said!r} is {whole[start:end][:80]!r}")
