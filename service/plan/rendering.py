"""Renders messages with a chat template, deterministically. Runs in the planning child."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes

# Private, but vLLM's renderer builds on it: a template must render here as it does in serving.
from transformers.utils.chat_template_utils import _compile_jinja_template

from service.errors import TemplateRefused
from service.plan.sources.rows import RejectedError, RejectReason

MAX_RENDER_CHARS = 2**24
"""Maximum length of one rendering."""

PLAN_DATE = datetime(2024, 7, 26)
"""The date that `strftime_now` sees in a template: planning again on another day must give the same bytes.

It is the date that Llama's own templates fall back to.
"""

_STAND_IN = re.compile(r"QuarryStandIn\d+C\d+X")

FIELD = "chat_template"
CURE = "pass a 'chat_template' that marks the assistant's text with {% generation %} ... {% endgeneration %}"

FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError),
    *(LookupError, RecursionError, TypeError, ValueError),
)
"""What a template may raise on some messages."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


class RenderFailed(RejectedError):
    """The template failed on these messages; the detail has its error."""

    def __init__(self, detail: str) -> None:
        super().__init__(RejectReason.TEMPLATE_FAILED, detail)


class RenderTooLong(RejectedError):
    """A rendering exceeded `MAX_RENDER_CHARS`, or all renderings of one conversation exceeded their limit."""

    def __init__(self, detail: str = "the rendered conversation is too long") -> None:
        super().__init__(RejectReason.RENDER_TOO_LONG, detail)


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation; `generated` are its spans `[start, end)` inside `{% generation %}`."""

    text: str
    generated: tuple[tuple[int, int], ...]


class ChatTemplate:
    """One compiled template with the tokenizer's special tokens as variables. Runs in jinja's sandbox.

    `source` is the template's text. `marks_generation` says whether it has `{% generation %}` blocks.
    `options` are further variables, all of which it must read. It may run forever, so only a child process
    compiles or renders it. Raises TemplateRefused if it is not a template, or has generation blocks whose
    positions cannot be known.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source
        options = options or {}
        self._variables = {**special_tokens, "strftime_now": PLAN_DATE.strftime, **options}
        try:
            # Bypass the cache, since this environment is modified.
            self._environment = _compile_jinja_template.__wrapped__("").environment
            # Remove randomness: planning again must give the same bytes.
            self._environment.globals.pop("lipsum", None)
            self._environment.filters.pop("random", None)
            tree = self._environment.parse(source)
            self.marks_generation = _marks_generation(tree)
            unread = options.keys() - meta.find_undeclared_variables(tree)
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            # The other errors: nesting too deep for the parser or for Python, or a number with too many
            # digits.
            detail = f"the chat template does not compile: {error}"
            raise TemplateRefused(detail, field=FIELD, cure="fix the template's syntax") from error
        if unread:
            detail = f"the chat template does not read {min(unread)!r}"
            cure = "fix the option's name, or leave it out"
            raise TemplateRefused(detail, field=f"{FIELD}_kwargs.{min(unread)}", cure=cure)

    def render(self, messages: Messages, tools: Tools, *, add_generation_prompt: bool) -> Rendering:
        """Render messages. Raises RenderFailed, RenderTooLong."""
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        num_chars = 0
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self._environment.activate_tracker(pieces, spans):
                for piece in self._template.generate(**variables):
                    pieces.append(piece)
                    num_chars += len(piece)
                    if num_chars > MAX_RENDER_CHARS:
                        raise RenderTooLong
        except FAILURES as error:
            raise RenderFailed(f"{type(error).__name__}: {error}") from error
        return Rendering("".join(pieces), tuple(span for span in spans if span[0] < span[1]))


@dataclass(frozen=True)
class Conversation:
    """Messages and their template. Rendering raises RenderFailed, RenderTooLong."""

    template: ChatTemplate
    messages: Messages
    tools: Tools = None

    @cached_property
    def rendering(self) -> Rendering:
        """The messages rendered as a finished conversation."""
        return self.template.render(self.messages, self.tools, add_generation_prompt=False)

    def prompt(self) -> str:
        """Render the messages as the prompt of the next turn."""
        return self.template.render(self.messages, self.tools, add_generation_prompt=True).text

    def check_written(self) -> None:
        """Raise RenderFailed if the template leaves out calls, or a message that is no answer: many do.

        They are rendered with stand-ins; if that fails, nothing is known. What is then not written must also
        change nothing: a template may write it in another form, or only what it knows.
        """
        each = list(enumerate(self.messages))
        others = [_instead(message, place, set()) for place, message in each]
        try:
            written = set(_STAND_IN.findall(replace(self, messages=others).rendering.text))
            silent = [_instead(message, place, written) for place, message in each]
            gone = [place for place, message in each if silent[place] != message]
            if not gone or replace(self, messages=silent).rendering.text != self.rendering.text:
                return
        except RenderFailed:
            return
        role = self.messages[gone[0]]["role"]
        fault = f"the {'calls' if role == 'assistant' else 'text'} of message {gone[0]}, of {role!r}"
        raise RenderFailed(f"the template leaves out {fault}: pass a 'chat_template' that does not")


def _instead(message: Mapping[str, Any], place: int, written: Collection[str]) -> Mapping[str, Any]:
    """Return a message whose calls, or the text of one that is no answer, are stand-ins not in `written`.

    One without text is unchanged: nothing of it could be left out.
    """
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        named = {"name": f"QuarryStandIn{place}C{number}X", "arguments": {}}
        calls.append(call if named["name"] in written else {**call, **named, "function": named})
    if calls:
        return {**message, "tool_calls": calls}
    word = f"QuarryStandIn{place}C0X"
    says_nothing = message["role"] == "assistant" or not message["content"].strip()
    return message if says_nothing or word in written else {**message, "content": word}


def _marks_generation(tree: nodes.Template) -> bool:
    """Return whether the template has `{% generation %}`.

    Raises TemplateRefused if such a block is inside a macro or a `set`, `filter` or `call` block: these write
    to separate buffers, so the spans that transformers reports would be shifted.
    """

    def blocks(root: nodes.Node) -> list[nodes.CallBlock]:
        calls = root.find_all(nodes.CallBlock)
        return [call for call in calls if getattr(call.call.node, "name", None) == "_generation_support"]

    for buffered in tree.find_all((nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock)):
        if any(block is not buffered for block in blocks(buffered)):
            where = f"inside a {type(buffered).__name__}, line {buffered.lineno}"
            detail = (
                f"the chat template has {{% generation %}} {where}: its position in the text cannot be known"
            )
            cure = "move {% generation %} out of macros and of set, filter, call and generation blocks"
            raise TemplateRefused(detail, field=FIELD, cure=cure)
    return bool(blocks(tree))
