"""Text of others made safe to look at: nothing in it hides, moves or reorders what stands around it. Pure."""

import re

_REORDERING = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_HIDDEN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff{_REORDERING}]")


def visible(text: str) -> str:
    """Return `text` with a name for every character that would hide or reorder others; line ends are kept."""
    return _HIDDEN.sub(lambda match: f"<U+{ord(match[0]):04X}>", text)


def one_line(text: str) -> str:
    """Return `text` visible, with a name for line ends and tabs as well."""
    return visible(text).replace("\n", "<U+000A>").replace("\t", "<U+0009>")
