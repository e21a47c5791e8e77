"""Renders prompts and parses answers of conversations while they are answered. Runs in a child.

A question is a name and its arguments; the answer is a list, or `rejected` with a reason and a detail.
Answers that call tools, or whose reasoning is a separate field in the template, are parsed by vLLM's own
parsers, as in `vllm serve`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from operator import eq
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schemas.base import first_fault
from schemas.generate import Generate
from service.errors import OptionRefused, TemplateRefused
from service.plan.rendering import Conversation, Messages, RenderFailed, Tools
from service.plan.samples import SampleTokenizer
from service.plan.sources.conversations import THOUGHTS
from service.plan.sources.rows import RejectedError, RejectReason
from service.plan.tokenizer import TextTokenizer

CALL = {"name": "look", "arguments": {"at": "it"}}
LEAST_OPENING = 4
"""In characters; a shorter text before a call's name, such as a bracket, does not identify a call."""
MAX_DEPTH = 64
ASKED = {"role": "user", "content": "question"}


Answer = tuple[str, tuple[object, ...], bytes]
"""Its kind, its JSON-serializable values, and the bytes that follow them."""


class Turns:
    """Answers questions about the conversations of one job."""

    def __init__(self, tokenizer: SampleTokenizer, generate: Generate, folder: Path) -> None:
        """Load the parsers that the job names. Raises OptionRefused."""
        self._tokenizer, self._texts, self._generate = tokenizer, tokenizer.texts, generate
        self._parser: Any = None
        self._call_marks: set[int] | None = None
        self._opening = ""
        if generate.tool_parser or generate.reasoning_parser:
            self._parser = _parser(generate, tokenizer, folder)

    def answer(self, question: Sequence[Any]) -> Answer:
        """Return the answer to a question. Raises TemplateRefused, OptionRefused (a parser)."""
        try:
            match question:
                case ("prompt", messages, tools, entry):
                    return self._prompt(self._chat(messages, tools, entry))
                case ("rendered", messages, tools, entry, said, ends, last_only):
                    chat = self._chat(messages, tools, entry)
                    if self._texts.ids(chat.rendering.text)[: len(said)].tolist() == said:
                        return "rendered", (0,), b""
                    return self._rendered(chat, ends, last_only=last_only)
                case ("is prompt", token_ids, messages, tools, entry):
                    return self._is_prompt(token_ids, self._chat(messages, tools, entry))
                case ("read", before, token_ids, tools, entry, is_stopped):
                    said = _Said(self._texts, before, token_ids, self._generate.stop if is_stopped else ())
                    return self._read(said, tools, entry)
        except RejectedError as error:
            return "rejected", (error.reject.reason, error.reject.detail), b""
        except UnicodeEncodeError as error:
            return "rejected", (RejectReason.INVALID_SAMPLE, f"not a Unicode text: {error.reason}"), b""
        raise AssertionError(f"there is no question {question[0]}")

    def _chat(self, messages: Messages, tools: Tools, entry: str | None) -> Conversation:
        return self._tokenizer.chat(messages, tools, self._entry(entry))

    def _prompt(self, chat: Conversation) -> Answer:
        """Return the token ids of a turn's prompt, int32."""
        ids = self._texts.ids(chat.prompt())
        self._tokenizer.check_vocabulary(ids)
        return "prompt", (len(ids),), ids.astype("<i4").tobytes()

    def _rendered(
        self, chat: Conversation, ends: Sequence[Sequence[int | None]], *, last_only: bool
    ) -> Answer:
        """Return the token ids of a conversation, int32, and its loss mask, uint8."""
        turns = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
        ends = ends[-1:] if last_only else ends
        try:
            row = self._tokenizer.supervised(chat, turns, last_only=last_only, ends=ends)
        except TemplateRefused as error:  # it renders, but its turns cannot be found
            raise RejectedError(RejectReason.TURN_BOUNDARIES, str(error)) from error
        self._tokenizer.check_vocabulary(row.ids)
        return "rendered", (len(row.ids),), row.ids.astype("<i4").tobytes() + row.mask.tobytes()

    def _is_prompt(self, token_ids: Sequence[int], chat: Conversation) -> Answer:
        """Return whether the tokens decode to the same text as a turn's prompt."""
        wanted = self._texts.ids(chat.prompt())
        read = [self._texts.decode(ids, skip_marks=False) for ids in (token_ids, wanted.tolist())]
        return "is prompt", (read[0] == read[1],), b""

    def _read(self, said: "_Said", tools: Tools, entry: str | None) -> Answer:
        """Return an answer as a message, the fault of its calls, and the special tokens its text lacks."""
        if self._parser is None:
            marks = set(self._texts.of_library.all_special_ids)
            lost = self._texts.decode([token for token in said.ids if token in marks], skip_marks=False)
            return "read", ({"role": "assistant", "content": said.text()}, "", lost), b""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        options = self._tokenizer.options(self._entry(entry))
        try:
            request = ChatCompletionRequest(messages=[ASKED], model="", tools=list(tools) if tools else None)
        except ValidationError as error:
            fault = f"tools: {first_fault(error)}"
            raise RejectedError(RejectReason.INVALID_SAMPLE, fault) from error
        parser = self._parser(self._texts.of_library, request.tools, chat_template_kwargs=options)
        request = parser.adjust_request(request)
        text = said.text(skip_marks=request.skip_special_tokens)
        calls_tools = bool(self._generate.tool_parser and tools)
        named = {"enable_auto_tools": calls_tools, "model_output_token_ids": said.ids}
        try:
            reasoning, content, called = parser.parse(text, request, **named)
        except NotImplementedError as error:  # vLLM lists some parsers that work for only one model
            raise _refused(self._generate, error) from error
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
            detail = f"vLLM's parser fails on it: {type(error).__name__}: {error}"
            raise RejectedError(RejectReason.BROKEN_TOOL_CALL, detail) from error
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if reasoning:
            message |= dict.fromkeys(THOUGHTS, reasoning)
        calls, fault = _calls(called or (), tools)
        if calls:
            message["tool_calls"] = calls
        elif calls_tools and not fault and self._calls_in_vain(said.ids, text):
            fault = f"it begins a call that cannot be read: {text[-80:]!r}"
        return "read", (message, fault, ""), b""

    def _calls_in_vain(self, token_ids: Sequence[int], text: str) -> bool:
        """Return whether an answer begins a call: has a token or text the template only writes for calls."""
        if self._call_marks is None:
            chat = self._tokenizer.chat([ASKED], None, None)
            call = {"type": "function", "function": CALL}
            said = {"role": "assistant", "content": ""}
            try:
                with_call, without = (
                    replace(chat, messages=[ASKED, answer]).rendering.text
                    for answer in (said | {"tool_calls": [call]}, said)
                )
            except RenderFailed:
                with_call = without = ""  # it does not support calls
            marks = self._texts.marks
            self._call_marks = {
                token for mark, token in marks.items() if mark in with_call and mark not in without
            }
            before = with_call.partition(str(CALL["name"]))[0]
            same = sum(takewhile(bool, map(eq, before, without)))
            self._opening = before[same:].strip()
        is_opened = len(self._opening) >= LEAST_OPENING and self._opening in text
        return is_opened or not self._call_marks.isdisjoint(token_ids)

    def _entry(self, name: str | None) -> Any:  # noqa: ANN401 - a MixEntry
        return next((entry for entry in self._generate.mix if entry.name == name), None)


class _Said:
    """An answer's tokens, and the last tokens before it, which affect how its first tokens decode."""

    def __init__(
        self, texts: TextTokenizer, before: Sequence[int], ids: Sequence[int], stop: Sequence[str]
    ) -> None:
        """Take an answer; if it ended at a string of `stop`, its text is cut there, as a server does."""
        self._texts, self._before, self.ids, self._stop = texts, list(before), list(ids), stop

    def text(self, *, skip_marks: bool = True) -> str:
        """Return its text as a server would return it."""
        text = self._read(self.ids, skip_marks=skip_marks)
        # If the last token completes several stop strings, the first one ended the answer.
        known = len(self._read(self.ids[:-1], skip_marks=skip_marks)) if self._stop else 0
        found = [(text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in self._stop]
        return text[: min(((at + size, at) for at, size in found if at >= 0), default=(0, len(text)))[1]]

    def _read(self, ids: list[int], *, skip_marks: bool) -> str:
        whole = self._texts.decode(self._before + ids, skip_marks=skip_marks)
        before = self._texts.decode(self._before, skip_marks=skip_marks)
        is_behind = whole.startswith(before)
        return whole[len(before) :] if is_behind else self._texts.decode(ids, skip_marks=skip_marks)


def _calls(called: Sequence[Any], tools: Tools) -> tuple[list[dict[str, Any]], str]:
    """Return the calls in OpenAI's form, with arguments as an object, or what is wrong with one of them."""
    calls: list[dict[str, Any]] = []
    known = {tool.get("function", tool).get("name") for tool in tools or ()}
    for call in called:
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            return [], f"the arguments of {call.name!r} are not JSON: {error}"
        if not isinstance(arguments, dict) or _depth(call.arguments) > MAX_DEPTH:
            return [], f"the arguments of {call.name!r} are no object of at most {MAX_DEPTH} levels"
        if call.name not in known:
            return [], f"there is no tool {call.name!r}"
        calls.append({"type": "function", "function": {"name": call.name, "arguments": arguments}})
    return calls, ""


def _depth(text: str) -> int:
    """Return an upper bound on the nesting depth of a JSON text: brackets in strings count, too."""
    levels = accumulate((char in "[{") - (char in "]}") for char in text)
    return max(levels, default=0)


def _parser(generate: Generate, tokenizer: SampleTokenizer, folder: Path) -> Any:  # noqa: ANN401
    try:
        from vllm.parser import ParserManager

        config = json.loads((folder / "config.json").read_bytes())
        return ParserManager.get_parser(
            tool_parser_name=generate.tool_parser,
            reasoning_parser_name=generate.reasoning_parser,
            enable_auto_tools=bool(generate.tool_parser),
            is_harmony=config.get("model_type") == "gpt_oss",
            tokenizer=tokenizer.texts.of_library,
        )
    except (ImportError, TypeError, ValueError, LookupError, AttributeError, OSError, RuntimeError) as error:
        # A parser may fail in any way on a tokenizer that it was not written for; or vLLM is not installed.
        raise _refused(generate, error) from error


def _refused(generate: Generate, error: Exception) -> OptionRefused:
    field = "generate.tool_parser" if generate.tool_parser else "generate.reasoning_parser"
    cure = "name a parser of `vllm serve --tool-call-parser` and `--reasoning-parser` that is the model's"
    return OptionRefused(f"vLLM's parsers cannot read the answers: {error}", field=field, cure=cure)
