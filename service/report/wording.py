"""Formats numbers for people, and truncates text of a dataset to one line. Pure functions."""

import math

from service.visible import visible

MAX_TEXT_CHARS = 200


def count(number: int) -> str:
    """Return `12,345`."""
    return f"{number:,}"


def number(value: float | None) -> str:
    """Return four significant digits, in plain notation if that is short; `-` for None."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def rms_text(value: float) -> str:
    """Return a root mean square in words."""
    return "out of bounds" if value == math.inf else number(value)


def percent(share: float) -> str:
    """Return `70.1 %`; only exact values give 0 or 100."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{100 * share:.3g} %"


def short(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return `text` with control characters visible, truncated and on one line."""
    return visible(text if len(text) <= limit else f"{text[:limit]}...").replace("\n", " ")
