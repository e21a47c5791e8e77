"""A sample -> token ids and loss mask by the target's tokenizer and chat template, or a named reject."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.dataset.columns import most_tokens
from schemas.request import ExtractRequest
from schemas.source import Message, Sample
from service.errors import OptionRefused, TemplateRefused
from service.plan.boundaries import PROBE, Span, TurnFinder, UnstableBoundaries, probe
from service.plan.child.task import Step
from service.plan.rendering import CURE, FIELD, ChatTemplate, Conversation, RenderFailed, RenderTooLong
from service.plan.sources.rows import RejectedError, RejectReason, RowReject
from service.plan.target import Target
from service.plan.tokenizer import Encoding, TextTokenizer
from service.plan.units import Tokenized


class SampleTokenizer:
    """Tokenizes the samples of one job, in the planning child; `on_step` is called as it goes on.

    `limit_tokens` is the longest sample: the request's `max_tokens`, what the engine takes as a prompt, and
    what a row can hold, less the room for an answer in a `generate` job. Raises UnknownModel (no usable
    tokenizer), TemplateRefused, OptionRefused.
    """

    def __init__(
        self, target: Target, request: ExtractRequest, on_step: Callable[[Step], None] = lambda _: None
    ) -> None:
        self._target = target
        self._request = request
        self._tokenizer = TextTokenizer(target.folder, request.model, on_step)
        self._templates: dict[str, ChatTemplate] = {}
        self._trailers: dict[str, str] = {}
        self.limit_tokens = _limit(target, request)
        on_step(Step.TEMPLATE)
        self.template_sha256 = _template_digest(request.chat_template or self._tokenizer.chat_templates)
        if request.chat_template is not None:
            self._compiled(request.chat_template)

    def encode(self, sample: Sample) -> Tokenized | RowReject:
        """Return the tokens of a sample, at least one; in a `generate` job the prompt, unsupervised.

        A longer one than `limit_tokens` is cut at the end or rejected as the request says; a prompt is
        never cut, because it would lose the header of the answer. Raises TemplateRefused where the template
        itself is at fault.
        """
        try:
            return self._checked(self._encode(sample))
        except RejectedError as error:
            return error.reject
        except UnicodeEncodeError as error:
            return RowReject(RejectReason.INVALID_SAMPLE, f"not a Unicode text: {error.reason}")

    def _encode(self, sample: Sample) -> Tokenized:
        if sample.token_ids is not None:
            ids = np.asarray(sample.token_ids, dtype=np.int32)
            if sample.loss_mask is None:
                return _all_supervised(ids)
            return Tokenized(ids, np.asarray(sample.loss_mask, dtype=np.uint8))
        if sample.text is not None:
            return _all_supervised(self._tokenizer.encode(sample.text, special=True).ids)
        messages = [_for_template(message) for message in sample.messages or ()]
        tools = list(sample.tools or self._request.tools) or None
        template = self._template(with_tools=tools is not None)
        if self._request.generate is None:
            return self._conversation(Conversation.of(template, messages, tools))
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not asked:
            raise RejectedError(RejectReason.NO_PROMPT, "nothing comes before the assistant's turn")
        prompt = template.render(asked, tools, add_generation_prompt=True)
        return _all_supervised(self._tokenizer.encode(prompt.text).ids)

    def _conversation(self, chat: Conversation) -> Tokenized:
        text = chat.rendering.text
        if self._request.loss == "all":
            return _all_supervised(self._tokenizer.encode(text).ids)
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not turns:
            detail = "the conversation has no assistant turn"
            raise RejectedError(RejectReason.NOTHING_SUPERVISED, detail)
        if self._request.loss == "last_turn":
            turns = turns[-1:]
        encoding = self._tokenizer.encode(text, offsets=True)
        if self._request.on_too_long == "reject" and len(encoding.ids) > self.limit_tokens:
            raise self._too_long(len(encoding.ids))
        if chat.template.marks_generation:
            spans = self._marked_spans(chat, turns[-1])
        else:
            spans = self._found_spans(chat, turns, encoding)
        mask = np.zeros(len(encoding.ids), dtype=np.uint8)
        for start, end in spans:
            mask[encoding.tokens(start, end)] = 1
        return Tokenized(encoding.ids.astype(np.int32), mask)

    def _marked_spans(self, chat: Conversation, last_turn: int) -> Sequence[Span]:
        """Return the `{% generation %}` spans; for the last turn those that the turns before do not have."""
        spans = chat.rendering.generated
        before = chat.messages[:last_turn]
        if self._request.loss == "assistant" or not any(message["role"] == "assistant" for message in before):
            return spans
        earlier = Conversation.of(chat.template, before, chat.tools)
        return spans[len(earlier.rendering.generated) :]

    def _found_spans(self, chat: Conversation, turns: list[int], encoding: Encoding) -> list[Span]:
        """Return the spans of `turns` by render boundaries, as far as the sample is kept."""
        text = chat.rendering.text
        finder = TurnFinder(chat, self._tokenizer.marks, self._trailer(chat.template))
        kept_chars = int(encoding.ends[: self.limit_tokens].max(initial=0))
        spans: list[Span] = []
        for turn in turns:
            start, end = finder.span(turn)
            if start >= kept_chars:
                break
            spans.append((start, self._tokenizer.end_of_turn(text, encoding, start, end)))
        return spans

    def _checked(self, whole: Tokenized) -> Tokenized:
        """Apply what holds of every sample: not empty, ids in range, not too long, something supervised."""
        ids, mask = whole.ids, whole.mask
        if len(ids) == 0:
            raise RejectedError(RejectReason.EMPTY, "the sample has no tokens")
        outside = ids[ids >= self._target.vocab_size]
        if len(outside):
            detail = f"token id {outside[0]} is not below the model's vocabulary of {self._target.vocab_size}"
            raise RejectedError(RejectReason.ID_OUTSIDE_VOCABULARY, detail)
        generates = self._request.generate is not None
        if len(ids) > self.limit_tokens:
            if generates or self._request.on_too_long == "reject":
                raise self._too_long(len(ids))
            ids, mask = ids[: self.limit_tokens], mask[: self.limit_tokens]
        if generates:
            return Tokenized(ids, np.zeros_like(mask))
        supervised, needed = int(mask.sum()), self._request.min_supervised_tokens
        if supervised < needed:
            cut = f" among the first {self.limit_tokens}" if len(ids) < len(whole.ids) else ""
            if not supervised:
                raise RejectedError(RejectReason.NOTHING_SUPERVISED, f"no token{cut} is supervised")
            detail = f"{supervised} of the {needed} supervised tokens that are needed{cut}"
            raise RejectedError(RejectReason.TOO_FEW_SUPERVISED, detail)
        return Tokenized(ids, mask)

    def _too_long(self, num_tokens: int) -> RejectedError:
        return RejectedError(RejectReason.TOO_LONG, f"{num_tokens} tokens, {self.limit_tokens} are allowed")

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        source = self._tokenizer.chat_template(self._request.chat_template, with_tools=with_tools)
        if source is None:
            detail = f"the tokenizer of {self._request.model!r} has no chat template"
            cure = "pass a 'chat_template', or give 'text' or 'token_ids' samples"
            raise TemplateRefused(detail, field=FIELD, cure=cure)
        return self._compiled(source)

    def _compiled(self, source: str) -> ChatTemplate:
        if source not in self._templates:
            options = self._request.chat_template_kwargs
            template = ChatTemplate(source, self._tokenizer.special_tokens, options)
            try:
                template.render(PROBE, None, add_generation_prompt=False)
            except (RenderFailed, RenderTooLong) as error:
                fault = f"does not render a plain conversation: {error}"
                raise self._refused(template, fault, "pass a 'chat_template' that does") from error
            self._templates[source] = template
        return self._templates[source]

    def _refused(self, template: ChatTemplate, fault: str, cure: str) -> TemplateRefused:
        name = f"{hashlib.sha256(template.source.encode()).hexdigest()[:12]} of {self._request.model!r}"
        return TemplateRefused(f"the chat template {name} {fault}", field=FIELD, cure=cure)

    def _trailer(self, template: ChatTemplate) -> str:
        """Refuse by name, at the first conversation, a template whose turns cannot be found; see `probe`."""
        if template.source not in self._trailers:
            try:
                self._trailers[template.source] = probe(template, self._tokenizer.marks)
            except (UnstableBoundaries, RenderFailed) as error:
                fault = f"has no stable turn boundaries: {error}"
                raise self._refused(template, fault, CURE) from error
        return self._trailers[template.source]


def _all_supervised(ids: npt.NDArray[Any]) -> Tokenized:
    return Tokenized(ids.astype(np.int32), np.ones(len(ids), dtype=np.uint8))


def _limit(target: Target, request: ExtractRequest) -> int:
    storable = most_tokens(target.hidden_size, target.dtype)
    limit = min(request.max_tokens, target.max_model_len - 1, storable)
    if request.generate is None:
        return limit
    answer = request.generate.max_tokens
    if limit <= answer:
        detail = f"an answer of {answer} tokens leaves no room for a prompt within {limit}"
        cure = f"ask for fewer than {limit} tokens, or raise 'max_tokens'"
        raise OptionRefused(detail, field="generate.max_tokens", cure=cure)
    return limit - answer


def _template_digest(template: str | Mapping[str, str] | None) -> str | None:
    """Return the sha256 of the template's text, or of all named templates' where a tokenizer has several."""
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _for_template(message: Message) -> dict[str, Any]:
    """Return what a template sees, as when served: always `content`, and call arguments as an object."""
    seen = {"content": "", **message.for_template()}
    for call in seen.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                continue
    return seen
