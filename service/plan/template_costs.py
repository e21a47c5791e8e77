"""What a step of a chat template would make, in characters and items, before it is done. Pure.

A cost takes what its step takes. It is an upper bound, and exact or near it for text of a plain template.
Where a step takes what no template needs, such as a width that is itself a value, it raises OverflowError.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter

MAX_RENDER_CHARS = 2**24
"""Longest rendering of one sample, and the most that one step of its template may make."""
MAX_ITEMS = 2**20
"""Most items of lists and mappings in one value: they are counted one by one."""
MAX_BITS = 1024
"""Longest whole number; division takes the square of the length."""
MAX_PADDING = 1024
"""Longest indentation and separator of `tojson`, and most decimals: each stands many times in a result."""

_PRINTF = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")
_DIGITS = re.compile(r"\d+")


def check(num_items: int, limit: int = MAX_RENDER_CHARS) -> None:
    """Raise OverflowError where a step would make more than `limit`."""
    if num_items > limit:
        raise OverflowError(f"a step of the template would make more than {limit} characters or items")


def weight(value: object) -> int:
    """Return the characters and items in `value`, each as often as printing would come to it.

    Forty lists that each hold the one before twice are small in memory, and endless to print. Raises
    OverflowError where there are more than `MAX_RENDER_CHARS` or `MAX_ITEMS`, or a number has more than
    `MAX_BITS`.
    """
    if isinstance(value, str):
        check(len(value))
        return len(value)
    total, num_items, waiting = 0, 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, int):
            if one.bit_length() > MAX_BITS:
                raise OverflowError("a step of the template makes too large a number")
            total += 1 + one.bit_length() // 3
        elif isinstance(one, list | tuple | Mapping):
            total += 1
            num_items += len(one)
            check(num_items, MAX_ITEMS)
            waiting.extend(one)
            if isinstance(one, Mapping):
                waiting.extend(one.values())
        else:
            total += 1
        check(total)
    return total


def operator_cost(operator: str, left: object, right: object) -> int:
    """Return the size of `left operator right`, 0 where that is not larger than the two."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**" or left.bit_length() + right.bit_length() > MAX_BITS:
            raise OverflowError(f"{operator!r} of such numbers is too large for a template")
        return 0
    if operator == "*":
        times, many = (left, right) if isinstance(left, int) else (right, left)
        return weight(many) * times if isinstance(times, int) else 0
    if operator == "%" and isinstance(left, str | bytes):
        return _printf(left, right)
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        return len(left) + len(right)
    return 0


def _printf(form: str | bytes, values: object) -> int:
    text = _text(form)
    fields = _PRINTF.findall(text)
    padding = sum(_width(width) + _width(precision) for width, precision in fields)
    return len(text) + padding + weight(values) * (len(fields) if "%(" in text else 1)


def _printf_filter(form: object, *args: object, **kwargs: object) -> int:
    return _printf(str(form), kwargs or args)


def _format(form: str | bytes, *args: object, **kwargs: object) -> int:
    text, padding, names = _text(form), 0, list[str]()
    for _, name, spec, _ in Formatter().parse(text):
        if spec and "{" in spec:
            raise OverflowError("a template may not take a width from a value")
        padding += sum(map(_width, _DIGITS.findall(spec or "")))
        names += [] if name is None else [name]
    return len(text) + padding + weight((*args, kwargs)) * (len(names) if any(names) else 1)


def _width(digits: str) -> int:
    if digits == "*" or len(digits) > 9:
        raise OverflowError("a template may not take a width from a value, nor one so large")
    return int(digits or 0)


def _replace(value: object, old: object, new: object, count: int | None = None) -> int:
    text, sought, put = _text(value), _text(old), _text(new)
    if len(put) <= len(sought):
        return len(text)
    num_found = text.count(sought)
    if count is not None and count >= 0:
        num_found = min(num_found, count)
    return len(text) + num_found * (len(put) - len(sought))


def _join(separator: object, pieces: object) -> int:
    num_pieces = len(pieces) if isinstance(pieces, str | list | tuple | Mapping) else 0
    return weight(pieces) + len(_text(separator)) * num_pieces


def _join_filter(pieces: object, d: object = "", attribute: object = None) -> int:
    return _join(d, pieces)


def _indent(s: object, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    text = _text(s)
    return len(text) + (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else width)


def _wordwrap(
    s: object,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> int:
    return len(_text(s)) * (1 + len(wrapstring or ""))


def _tojson(
    x: object,
    ensure_ascii: object = False,
    indent: int | str | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: object = False,
) -> int:
    _small(indent, *(separators or ()))
    return weight(x)


def _sum(iterable: object, attribute: object = None, start: object = 0) -> int:
    if not isinstance(start, int | float):
        # A list to which its own items are added while they are read has no end.
        raise OverflowError("a template may only sum from a number")
    return 0


def _round(value: object, precision: int = 0, method: object = "common") -> int:
    return _small(precision)


def _slice(value: object, slices: int, fill_with: object = None) -> int:
    return _small(slices)


def _batch(value: object, linecount: int, fill_with: object = None) -> int:
    return linecount


def _center(value: object, width: int = 80, fillchar: object = " ") -> int:
    return width


def _to_bytes(value: object, length: int = 1, byteorder: object = "big", *, signed: object = False) -> int:
    return length


def _expandtabs(text: str | bytes, tabsize: int = 8) -> int:
    return len(text) * max(tabsize, 1)


def _translate(text: str | bytes, table: object, delete: object = b"") -> int:
    values = table.values() if isinstance(table, Mapping) else ()
    return len(text) * max((len(one) for one in values if isinstance(one, str)), default=1)


def _small(*values: object) -> int:
    for value in values:
        size = len(value) if isinstance(value, str) else abs(value) if isinstance(value, int) else 0
        if size > MAX_PADDING:
            raise OverflowError(f"a template may not pad, part or round by {size}")
    return 0


def _text(value: object) -> str:
    return (
        value.decode("latin-1")
        if isinstance(value, bytes)
        else value
        if isinstance(value, str)
        else str(value)
    )


Cost = Callable[..., int]

FILTER_COSTS: Mapping[str, Cost] = {
    "batch": _batch,
    "center": _center,
    "format": _printf_filter,
    "indent": _indent,
    "join": _join_filter,
    "pprint": weight,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "string": weight,
    "sum": _sum,
    "tojson": _tojson,
    "wordwrap": _wordwrap,
}
"""By filter. One that is not here makes at most a few times what it is given."""

METHOD_COSTS: Mapping[str, Cost] = {
    "center": _center,
    "expandtabs": _expandtabs,
    "format": _format,
    "format_map": _format,
    "join": _join,
    "ljust": _center,
    "replace": _replace,
    "rjust": _center,
    "to_bytes": _to_bytes,
    "translate": _translate,
    "zfill": _center,
}
"""By method of text, bytes and numbers. The first argument is the object itself."""
