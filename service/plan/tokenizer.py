"""Turns text into token ids and their character spans, with the target's own tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from service.errors import TemplateRefused, UnknownModel
from service.model_tokenizer import open_tokenizer
from service.plan.child.task import Step


@dataclass(frozen=True, slots=True)
class Encoding:
    """One tokenization of one text.

    `ids` is int64 `[T]`; token `t` covers the characters `[starts[t], ends[t])`. `starts` and `ends` are
    int64 `[T]` and non-decreasing, or empty if they were not requested.
    """

    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def tokens(self, start: int, end: int) -> slice:
        """Return the tokens with a character in `[start, end)`; an empty token counts by its position."""
        first = np.searchsorted(np.maximum(self.ends, self.starts + 1), start, side="right")
        return slice(int(first), int(np.searchsorted(self.starts, end, side="left")))


class TextTokenizer:
    """The tokenizer in `folder`; error messages call its model `model`. Runs in the planning child.

    `marks` maps the texts of its added tokens to their ids. `special_tokens` maps names such as `bos_token`,
    as templates use them, to texts. `chat_templates` is the model's own template, or its templates by name.
    `of_library` is the transformers tokenizer. Raises UnknownModel if it cannot be loaded.
    """

    def __init__(self, folder: Path, model: str, on_step: Callable[[Step], None]) -> None:
        self._model = model
        self._on_step = on_step
        self._on_step(Step.TOKENIZER)
        self.of_library = _load(folder, model)
        added = self.of_library.added_tokens_decoder
        self.marks: Mapping[str, int] = {token.content: token_id for token_id, token in added.items()}
        self._stripping = [token_id for token_id, token in added.items() if token.rstrip]
        self._mark_ids = np.asarray(sorted(self.marks.values()), dtype=np.int64)
        self.special_tokens: Mapping[str, str] = self.of_library.special_tokens_map
        self.chat_templates: str | Mapping[str, str] | None = self.of_library.chat_template

    def chat_template(self, override: str | None, *, with_tools: bool) -> str | None:
        """Return the template's text for a conversation: the override, or the model's own, or None."""
        try:
            chosen: str = self.of_library.get_chat_template(override, tools=[{}] if with_tools else None)
        except ValueError:
            return None
        return chosen

    def encode(self, text: str, *, special: bool = False, offsets: bool = False) -> Encoding:
        """Tokenize `text` whole.

        `special` adds the special tokens that the tokenizer puts around plain text; a template writes its
        own. Raises UnicodeEncodeError for lone surrogates; TemplateRefused if `offsets` are not available.
        """
        text.encode()
        if offsets and not self.of_library.is_fast:
            detail = f"the tokenizer of {self._model!r} does not say which characters a token stands for"
            cure = "use a model with a tokenizer.json, or 'loss': 'all', or 'token_ids' with a 'loss_mask'"
            raise TemplateRefused(detail, field="loss", cure=cure)
        self._on_step(Step.TOKENIZER)
        encoded = self.of_library(
            text,
            add_special_tokens=special,
            return_offsets_mapping=offsets,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        self._on_step(Step.TEMPLATE)
        spans = np.asarray(encoded["offset_mapping"] if offsets else [], dtype=np.int64).reshape(-1, 2)
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        for place in np.flatnonzero(np.isin(ids, self._stripping)) if offsets else ():
            # The white space that the mark takes may be an answer's, behind the header's mark.
            spans[place, 1] = spans[place, 0] + len(text[slice(*spans[place])].rstrip())
        return Encoding(ids, spans[:, 0], spans[:, 1])

    def ids(self, text: str) -> npt.NDArray[np.int64]:
        """Return the token ids `[T]` of rendered text. Raises UnicodeEncodeError."""
        return self.encode(text).ids

    def prompt_ids(self, text: str) -> npt.NDArray[np.int64]:
        """Return the token ids `[T]` of a whole text, which begins with one begin token, if with any.

        Text that a template made often begins with that token already. Raises UnicodeEncodeError.
        """
        ids, begin = self.encode(text, special=True).ids, self.of_library.bos_token_id
        is_doubled = begin is not None and ids[:2].tolist() == [begin, begin]
        return ids[1:] if is_doubled and not text.startswith(2 * self.of_library.bos_token) else ids

    def decode(self, token_ids: Sequence[int], *, skip_marks: bool = True) -> str:
        """Return an answer's text as a server would: without special tokens, unless `skip_marks` is false."""
        text: str = self.of_library.decode(token_ids, skip_special_tokens=skip_marks)
        return text

    def end_of_turn(self, text: str, encoding: Encoding, start: int, end: int) -> int:
        """Return the end of the last mark in `text[start:end]` if only white space follows it, else `end`.

        Templates write a newline after the end-of-turn mark, which a model need not produce.
        """
        inside = encoding.tokens(start, end)
        marked = np.flatnonzero(np.isin(encoding.ids[inside], self._mark_ids))
        if len(marked):
            after = int(encoding.ends[inside.start + marked[-1]])
            if text[after:end].isspace():
                return after
        return end


def _load(folder: Path, model: str) -> Any:  # noqa: ANN401 - transformers is not typed
    try:
        return open_tokenizer(folder)
    except ValueError as error:
        detail = f"the tokenizer of {model!r} cannot be loaded: {error}"
        cure = "give a model with a tokenizer that transformers loads without remote code"
        raise UnknownModel(detail, field="model", cure=cure) from error
