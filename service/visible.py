"""Makes text from others safe to display: nothing in it hides, moves or reorders the text around it. Pure."""

import re

_REORDERING = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_HIDDEN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff{_REORDERING}]")


def visible(text: str) -> str:
    """Return `text` with each character that hides or reorders others spelled out; keeps line ends, tabs."""
    return _HIDDEN.sub(lambda match: f"<U+{ord(match[0]):04X}>", text)


def one_line(text: str) -> str:
    """Return `visible(text)` with line ends and tabs spelled out as well."""
    return visible(text).replace("\n", "<U+000A>").replace("\t", "<U+0009>")
