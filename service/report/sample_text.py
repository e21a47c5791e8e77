"""Finds the piece of text that each token id adds, with the target's own tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from service.model_tokenizer import open_tokenizer
from service.visible import visible

if TYPE_CHECKING:
    from schemas.dataset.shard import LightRow
    from service.reader.row import Row

HEAD_TOKENS, TAIL_TOKENS = 320, 80
"""How many tokens are shown of a longer row."""
_NEWLINE = "\u21b5\n"
Decode = Callable[[list[int]], str]
_UNFINISHED = "\ufffd"
_CONTEXT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Token:
    """One token at its place in the row; `text` is None if only the id is known."""

    place: int
    id: int
    text: str | None
    supervised: bool


def load_tokenizer(folder: Path) -> tuple[Decode, int] | str:
    """Return a function that decodes ids with the tokenizer in `folder`, and its size; or why loading fails.

    Code that comes with a model is never run.
    """
    try:
        tokenizer = open_tokenizer(folder)
    except ValueError as error:
        return str(error)

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode, len(tokenizer)


def token_texts(ids: Sequence[int], decode: Decode, vocab_size: int) -> list[str | None]:
    """Return the text that each token adds to those before it, or None for an id that is not a token.

    A character that consists of several tokens is shown at the last one; the others are empty.
    """
    texts: list[str | None] = []
    before, shown = 0, 0
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            texts.append(None)
            before = shown = place + 1
            continue
        # Decoded after a few context tokens, because some tokenizers strip a leading space.
        known, now = decode(list(ids[before:shown])), decode(list(ids[before : place + 1]))
        last = place + 1 == len(ids)
        if now.endswith(_UNFINISHED) and not last and place + 1 - shown < _CONTEXT_TOKENS:
            texts.append("")
            continue
        texts.append(now[len(known) :])
        before, shown = max(before, shown - _CONTEXT_TOKENS), place + 1
    return texts


def sample_tokens(row: "LightRow | Row", tokenizer: tuple[Decode, int] | None) -> list[Token]:
    """Return the tokens of a row, or of a long one the first and last; only ids without a `tokenizer`."""
    if row.num_tokens <= HEAD_TOKENS + TAIL_TOKENS:
        parts = [range(row.num_tokens)]
    else:
        parts = [range(HEAD_TOKENS), range(row.num_tokens - TAIL_TOKENS, row.num_tokens)]
    tokens = []
    for part in parts:
        ids = row.input_ids[part.start : part.stop].tolist()
        texts = [None] * len(ids) if tokenizer is None else token_texts(ids, *tokenizer)
        for place, token, text in zip(part, ids, texts, strict=True):
            shown = None if text is None else visible(text).replace("\n", _NEWLINE)
            tokens.append(Token(place, token, shown, bool(row.loss_mask[place])))
    return tokens
