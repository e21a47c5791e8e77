"""Token ids -> the piece of text that each of them adds, by the target's own tokenizer.

Imports nothing heavy; `load_tokenizer` does.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Decode = Callable[[list[int]], str]
_UNFINISHED = "\ufffd"
_CONTEXT_TOKENS = 4


def load_tokenizer(folder: Path) -> tuple[Decode, int] | str:
    """Return what decodes ids with the tokenizer in `folder`, and its size; or why it cannot be loaded.

    Code that comes with a model is never run.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        return str(error).strip().split("\n", 1)[0]

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode, len(tokenizer)


def token_texts(ids: Sequence[int], decode: Decode, vocab_size: int) -> list[str | None]:
    """Return the text that each token adds to those before it; none for an id that is no token.

    A character of several tokens is shown at its last one, and the others are empty.
    """
    texts: list[str | None] = []
    before, shown = 0, 0
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            texts.append(None)
            before = shown = place + 1
            continue
        # Decoded behind a few tokens, because some tokenizers strip the space that a text begins with.
        known, now = decode(list(ids[before:shown])), decode(list(ids[before : place + 1]))
        last = place + 1 == len(ids)
        if now.endswith(_UNFINISHED) and not last and place + 1 - shown < _CONTEXT_TOKENS:
            texts.append("")
            continue
        texts.append(now[len(known) :])
        before, shown = max(before, shown - _CONTEXT_TOKENS), place + 1
    return texts
