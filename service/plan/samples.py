"""Turns a sample into token ids and loss mask with the target's tokenizer and chat template, or a reject."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.dataset.columns import most_tokens
from schemas.digest import canonical_json
from schemas.generate import MixEntry
from schemas.request import ExtractRequest
from schemas.source import Message, Sample
from service.errors import OptionRefused, TemplateRefused
from service.plan.boundaries import PROBE, Span, TurnFinder, UnstableBoundaries, probe
from service.plan.child.task import Step
from service.plan.dialogues import plan_dialogue, without_turns
from service.plan.rendering import (
    CURE,
    FIELD,
    ChatTemplate,
    Conversation,
    Messages,
    RenderFailed,
    RenderTooLong,
    Tools,
)
from service.plan.sources.conversations import THOUGHTS, json_object
from service.plan.sources.rows import RejectedError, RejectReason, RowReject
from service.plan.target import Target
from service.plan.tokenizer import Encoding, TextTokenizer
from service.plan.units import Tokenized


class SampleTokenizer:
    """Tokenizes the samples of one job, in the planning child; `on_step` is called at each step.

    `texts` tokenizes rendered text. `most_tokens` is the longest row: the minimum of the request's
    `max_tokens`, the engine's longest prompt, and what a row can hold. `limit_tokens` is the longest sample,
    which in a `generate` job leaves room for an answer. Raises UnknownModel (no usable tokenizer),
    TemplateRefused, OptionRefused.
    """

    def __init__(
        self, target: Target, request: ExtractRequest, on_step: Callable[[Step], None] = lambda _: None
    ) -> None:
        self._target = target
        self._request = request
        self.texts = TextTokenizer(target.folder, request.model, on_step)
        self._templates: dict[tuple[str, str], ChatTemplate] = {}
        self._trailers: dict[ChatTemplate, str] = {}
        storable = most_tokens(target.hidden_size, target.dtype)
        self.most_tokens = min(request.max_tokens, target.max_model_len - 1, storable)
        self.limit_tokens = self.most_tokens - _answer_room(request, self.most_tokens)
        on_step(Step.TEMPLATE)
        self.template_sha256 = _template_digest(request.chat_template or self.texts.chat_templates)
        if request.chat_template is not None:
            self._compiled(request.chat_template, request.chat_template_kwargs)

    def rows(self, sample: Sample, source_id: str) -> Sequence[Tokenized | RowReject]:
        """Return the rows of a sample: one, or one per turn if each turn is answered in a row of its own.

        Each has at least one token; in a `generate` job a row is an unsupervised prompt. A row longer than
        `limit_tokens` is truncated at the end or rejected, as the request says; a prompt is never truncated,
        because it would lose the header of the answer. Raises TemplateRefused if the template itself is at
        fault.
        """
        try:
            return self._rows(sample, source_id)
        except RejectedError as error:
            return (error.reject,)
        except UnicodeEncodeError as error:
            return (RowReject(RejectReason.INVALID_SAMPLE, f"not a Unicode text: {error.reason}"),)

    def _rows(self, sample: Sample, source_id: str) -> Sequence[Tokenized]:
        generate = self._request.generate
        entry = generate.drawn(source_id) if generate is not None else None
        if generate is None or not generate.is_rendered_again:
            return (self._checked(self._encode(sample, entry), entry),)
        if sample.messages is None:
            return (without_turns(self._checked(self._encode(sample, entry), entry), generate),)
        chat = self._chat(sample, entry)
        planned = plan_dialogue(chat, self.texts, self.most_tokens, generate, entry)
        return (self._checked(planned[0], entry), *planned[1:])

    def _encode(self, sample: Sample, entry: MixEntry | None) -> Tokenized:
        if sample.token_ids is not None:
            ids = np.asarray(sample.token_ids, dtype=np.int32)
            if sample.loss_mask is None:
                return _all_supervised(ids)
            return Tokenized(ids, np.asarray(sample.loss_mask, dtype=np.uint8))
        if sample.text is not None:
            if not sample.text:
                raise RejectedError(RejectReason.EMPTY, "the text is empty")
            return _all_supervised(self.texts.prompt_ids(sample.text))
        chat = self._chat(sample, entry)
        if self._request.generate is not None:
            asked = chat.messages[:-1] if chat.messages[-1]["role"] == "assistant" else chat.messages
            if not asked:
                raise RejectedError(RejectReason.NO_PROMPT, "nothing comes before the assistant's turn")
            return _all_supervised(self.texts.ids(replace(chat, messages=asked).prompt()))
        if self._request.loss == "all":
            return _all_supervised(self.texts.ids(chat.rendering.text))
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not turns:
            detail = "the conversation has no assistant turn"
            raise RejectedError(RejectReason.NOTHING_SUPERVISED, detail)
        return self.supervised(chat, turns, last_only=self._request.loss == "last_turn")

    def _chat(self, sample: Sample, entry: MixEntry | None) -> Conversation:
        messages = [_for_template(message) for message in sample.messages or ()]
        chat = self.chat(messages, list(sample.tools or self._request.tools) or None, entry)
        is_answered = self._request.generate is not None and messages[-1]["role"] == "assistant"
        replace(chat, messages=messages[:-1] if is_answered else messages).check_written()
        return chat

    def chat(self, messages: Messages, tools: Tools, entry: MixEntry | None) -> Conversation:
        """Return messages and template, compiled with a `mix` entry's options. Raises TemplateRefused."""
        template = self._template(self.options(entry), with_tools=tools is not None)
        return Conversation(template, messages, tools)

    def options(self, entry: MixEntry | None) -> Mapping[str, Any]:
        """Return the template's variables besides messages and tools, for a `mix` entry."""
        return self._request.chat_template_kwargs | (entry.chat_template_kwargs if entry else {})

    def supervised(
        self,
        chat: Conversation,
        turns: Sequence[int],
        *,
        last_only: bool,
        ends: Sequence[Sequence[int | None]] | None = None,
    ) -> Tokenized:
        """Return a rendered conversation's tokens with its assistant turns, or only the last, supervised.

        If the target answered them, `ends` has for each answer its last token, and the one behind it with
        which the target ended it, or None: a different mark after an answer is not supervised.

        Raises RejectedError, TemplateRefused, UnicodeEncodeError.
        """
        text = chat.rendering.text
        encoding = self.texts.encode(text, offsets=True)
        if self._request.on_too_long == "reject" and len(encoding.ids) > self.most_tokens:
            raise _too_long(len(encoding.ids), self.limit_tokens)
        if chat.template.marks_generation:
            spans = self._marked_spans(chat, turns[-1], last_only=last_only)
            has_more = ends is not None and len(spans) > len(ends)
            if has_more and text[slice(*spans[-1])] in self.texts.marks:
                spans = spans[:-1]  # TRL's for Phi-3 ends the conversation with one
        else:
            spans = self._found_spans(chat, turns[-1:] if last_only else turns, encoding)
        mask = np.zeros(len(encoding.ids), dtype=np.uint8)
        if ends is not None and len(ends) != len(spans):
            detail = f"{len(ends)} answers have {len(spans)} places in the rendering"
            raise RejectedError(RejectReason.TURN_BOUNDARIES, detail)
        answers = turns[-1:] if last_only else turns
        for place, (start, end) in enumerate(spans):
            inside = encoding.tokens(start, end)
            if ends is not None:
                prompt = replace(chat, messages=chat.messages[: answers[place]]).prompt()
                begin = max(start, len(prompt)) if text.startswith(prompt) else start
                span = begin, self.texts.end_of_turn(text, encoding, begin, end)
                answer, marks = chat.messages[answers[place]], self.texts.marks.values()
                inside = _said(text, encoding, span, answer, ends[place], marks)
            mask[inside] = 1
        return Tokenized(encoding.ids.astype(np.int32), mask)

    def check_vocabulary(self, ids: npt.NDArray[Any]) -> None:
        """Raise RejectedError if an id is not in the model's vocabulary."""
        outside = ids[ids >= self._target.vocab_size]
        if len(outside):
            detail = f"token id {outside[0]} is not below the model's vocabulary of {self._target.vocab_size}"
            raise RejectedError(RejectReason.ID_OUTSIDE_VOCABULARY, detail)

    def _marked_spans(self, chat: Conversation, last_turn: int, *, last_only: bool) -> Sequence[Span]:
        """Return the `{% generation %}` spans.

        With `last_only`, return only those that the conversation does not have without the last turn. Such
        may end with a mark that the whole conversation does not have there, such as Phi-3's, which ends it.
        """
        spans = chat.rendering.generated
        before, after = chat.messages[:last_turn], chat.messages[last_turn + 1 :]
        if not last_only or not any(message["role"] == "assistant" for message in before):
            return spans
        try:  # a question after the turn may drop the reasoning before it
            earlier = replace(chat, messages=[*before, *after]).rendering
        except RenderFailed:  # two questions in a row, or a result without a call
            earlier = replace(chat, messages=before).rendering
        texts = [chat.rendering.text[slice(*span)] for span in spans]
        said = [earlier.text[slice(*span)] for span in earlier.generated]
        num = len(said)
        if num and said[-1].strip() in self.texts.marks and said[-1:] != texts[num - 1 : num]:
            num -= 1
        return spans[num:]

    def _found_spans(self, chat: Conversation, turns: Sequence[int], encoding: Encoding) -> list[Span]:
        """Return the spans of `turns` found by rendering, as far as the sample is not truncated."""
        text = chat.rendering.text
        finder = TurnFinder(chat, self.texts.marks, self._trailer(chat.template))
        kept_chars = int(encoding.ends[: self.most_tokens].max(initial=0))
        spans: list[Span] = []
        for turn in turns:
            start, end = finder.span(turn)
            if start >= kept_chars:
                break
            spans.append((start, self.texts.end_of_turn(text, encoding, start, end)))
        return spans

    def _checked(self, whole: Tokenized, entry: MixEntry | None) -> Tokenized:
        """Apply the checks for all samples: not empty, ids in range, not too long, enough supervised."""
        ids, mask, limit_tokens = whole.ids, whole.mask, self.limit_tokens
        if len(ids) == 0:
            raise RejectedError(RejectReason.EMPTY, "the sample has no tokens")
        every = np.concatenate([ids, *(whole.dialogue.segments if whole.dialogue is not None else ())])
        self.check_vocabulary(every)
        generate = self._request.generate
        if generate is not None and entry is not None:
            limit_tokens = self.most_tokens - generate.of(entry.name).max_tokens
        if len(ids) > limit_tokens:
            if generate is not None or self._request.on_too_long == "reject":
                raise _too_long(len(ids), limit_tokens)
            ids, mask = ids[:limit_tokens], mask[:limit_tokens]
        if generate is not None:
            return replace(whole, mask=np.zeros_like(mask))
        supervised, needed = int(mask.sum()), self._request.min_supervised_tokens
        if supervised < needed:
            cut = f" among the first {limit_tokens}" if len(ids) < len(whole.ids) else ""
            if not supervised:
                raise RejectedError(RejectReason.NOTHING_SUPERVISED, f"no token{cut} is supervised")
            detail = f"{supervised} of the {needed} supervised tokens that are needed{cut}"
            raise RejectedError(RejectReason.TOO_FEW_SUPERVISED, detail)
        return Tokenized(ids, mask)

    def _template(self, options: Mapping[str, Any], *, with_tools: bool) -> ChatTemplate:
        source = self.texts.chat_template(self._request.chat_template, with_tools=with_tools)
        if source is None:
            detail = f"the tokenizer of {self._request.model!r} has no chat template"
            cure = "pass a 'chat_template', or give 'text' or 'token_ids' samples"
            raise TemplateRefused(detail, field=FIELD, cure=cure)
        return self._compiled(source, options)

    def _compiled(self, source: str, options: Mapping[str, Any]) -> ChatTemplate:
        key = source, canonical_json(options)
        if key not in self._templates:
            template = ChatTemplate(source, self.texts.special_tokens, options)
            try:
                template.render(PROBE, None, add_generation_prompt=False)
                Conversation(template, PROBE).check_written()
            except (RenderFailed, RenderTooLong) as error:
                fault = f"does not render a plain conversation: {error}"
                raise self._refused(template, fault, "pass a 'chat_template' that does") from error
            self._templates[key] = template
        return self._templates[key]

    def _refused(self, template: ChatTemplate, fault: str, cure: str) -> TemplateRefused:
        name = f"{hashlib.sha256(template.source.encode()).hexdigest()[:12]} of {self._request.model!r}"
        return TemplateRefused(f"the chat template {name} {fault}", field=FIELD, cure=cure)

    def _trailer(self, template: ChatTemplate) -> str:
        """Return the template's trailer; refuse a template whose turns cannot be found; see `probe`."""
        if template not in self._trailers:
            try:
                self._trailers[template] = probe(template, self.texts.marks)
            except (UnstableBoundaries, RenderFailed) as error:
                fault = f"has no stable turn boundaries: {error}"
                raise self._refused(template, fault, CURE) from error
        return self._trailers[template]


def _too_long(num_tokens: int, limit: int) -> RejectedError:
    return RejectedError(RejectReason.TOO_LONG, f"{num_tokens} tokens, {limit} are allowed")


def _all_supervised(ids: npt.NDArray[Any]) -> Tokenized:
    return Tokenized(ids.astype(np.int32), np.ones(len(ids), dtype=np.uint8))


def _said(
    text: str,
    encoding: Encoding,
    span: Span,
    answer: Mapping[str, Any],
    ends: Sequence[int | None],
    marks: Collection[int],
) -> slice:
    """Return the tokens of a span that the target generated: its answer, and the mark with which it ended it.

    What the template adds is excluded; reasoning is what precedes the text. If the answer's text is not in
    the span literally, return the whole span, without a mark at its end that is not in `ends`: calls may end
    with one of their own, and a text may lack the last mark of its answer. The mark behind the answer may
    begin the next message.
    """
    inside, content = encoding.tokens(*span), answer["content"]
    if not content and ends[-1] is None:  # it may be cut while it thinks
        content = answer.get("reasoning_content", content)
    content = content if content in text[slice(*span)] else content.strip()
    last = encoding.ids[inside][-1:].tolist()
    stop = inside.stop - int(bool(last) and last[0] in marks)
    # The template may have written the same before the answer, such as `a` in a channel's name.
    at = text.rfind(content, span[0], int(encoding.starts[stop]) if stop < inside.stop else span[1])
    at = text.find(content, *span) if at < 0 else at
    is_rewritten = at < 0 or "tool_calls" in answer
    said = encoding.tokens(at, at + len(content)) if content and not is_rewritten else slice(stop, stop)
    if is_rewritten or "reasoning_content" in answer:
        said = slice(inside.start, stop if last and last[0] in ends else said.stop)
    stop, own = said.stop, encoding.ids[said][-1:].tolist()
    for end in ends if ends[0] in marks and own != [ends[0]] else ends[-1:]:
        stop += int(encoding.ids[stop : stop + 1].tolist() == [end])
    return slice(said.start, stop)


def _answer_room(request: ExtractRequest, limit: int) -> int:
    """Return the tokens of a row that are reserved for an answer. Raises OptionRefused if no room is left."""
    answer = request.generate.longest_answer if request.generate is not None else 0
    if limit <= answer:
        detail = f"an answer of {answer} tokens leaves no room for a prompt within {limit}"
        cure = f"ask for fewer than {limit} tokens, or raise 'max_tokens'"
        raise OptionRefused(detail, field="generate.max_tokens", cure=cure)
    return answer


def _template_digest(template: str | Mapping[str, str] | None) -> str | None:
    """Return the sha256 of the template's text, or of all named templates if a tokenizer has several."""
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _for_template(message: Message) -> dict[str, Any]:
    """Return the message as a template sees it in serving: `content` always set, call arguments an object.

    Raises RejectedError for arguments that have a key twice.
    """
    seen = {"content": "", **message.for_template()}
    if message.reasoning_content:
        seen |= dict.fromkeys(THOUGHTS, message.reasoning_content)
    for call in seen.get("tool_calls", ()):
        function = call.get("function", call)
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments") or "{}", str):
            try:
                function["arguments"] = json.loads(arguments, object_pairs_hook=json_object)
            except (ValueError, RecursionError):
                continue
    return seen
