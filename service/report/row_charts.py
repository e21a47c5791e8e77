"""Charts of what rows are like: how long, and how much of each is supervised."""

import math
from collections import Counter
from collections.abc import Sequence

from service.proof.tally import SHARE_BINS, JobTally
from service.report.canvas import TOP, WIDTH, Canvas, Scale
from service.report.figure import Figure
from service.report.wording import count, percent

_BOTTOM, _HEIGHT = 190.0, 222.0
_LENGTH_BARS = 48


def lengths(tally: JobTally) -> Figure:
    """Return the histogram of rows by tokens."""
    width = _bar_width(max(tally.lengths))
    bars = Counter[int]()
    for length, rows in tally.lengths.items():
        bars[(length - 1) // width] += rows
    counts = [bars[number] for number in range(max(bars) + 1)]
    title = "Lengths"
    x = Scale(0, width * len(counts), 44, WIDTH - 12, whole=True)
    edges = [(number * width, (number + 1) * width) for number in range(len(counts))]
    hints = [
        f"{low + 1:,} to {high:,} tokens: {rows:,} rows"
        for (low, high), rows in zip(edges, counts, strict=True)
    ]
    svg = _bars(title, "Rows by number of tokens.", x, edges, counts, hints, "tokens of a row")
    marks = (("shortest", 0.0), ("5 % below", 0.05), ("median", 0.5), ("95 % below", 0.95), ("longest", 1.0))
    table = tuple((name, count(_at_share(tally.lengths, share))) for name, share in marks)
    healthy = "like your source; a wall at the right edge is samples cut at the longest length allowed."
    fact = f"Half of the rows have at most {table[2][1]} tokens, the longest has {table[4][1]}."
    return Figure(title, healthy, svg, ("row", "tokens"), table, fact)


def _bar_width(longest: int) -> int:
    """Return 1, 2 or 5 times a power of ten, so that about `_LENGTH_BARS` bars cover 1..longest."""
    rough = max(1.0, longest / _LENGTH_BARS)
    power = int(10 ** math.floor(math.log10(rough)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _at_share(lengths: Counter[int], share: float) -> int:
    """Return the length that `share` of the rows do not pass."""
    wanted, below = share * lengths.total(), 0
    for length in sorted(lengths):
        below += lengths[length]
        if below >= wanted:
            return length
    return max(lengths)


def shares(tally: JobTally) -> Figure:
    """Return the histogram of rows by supervised share, the mean of the loss mask."""
    counts = tally.shares.tolist()
    title = "Supervised share"
    step = 100 / SHARE_BINS
    edges = [(number * step, (number + 1) * step) for number in range(SHARE_BINS)]
    hints = [f"{low:g} to {high:g} %: {rows:,} rows" for (low, high), rows in zip(edges, counts, strict=True)]
    x = Scale(0, 100, 44, WIDTH - 12)
    svg = _bars(
        title, "Rows by share of supervised tokens.", x, edges, counts, hints, "supervised tokens of a row, %"
    )
    total = max(sum(counts), 1)
    table = tuple(
        (f"{low:g} to {high:g} %", count(rows), percent(rows / total))
        for (low, high), rows in zip(edges, counts, strict=True)
        if rows
    )
    odd = ""
    if tally.unsupervised_rows:
        odd = f"{tally.unsupervised_rows:,} rows hold no supervised token: nothing is learnt from them."
    healthy = "a hill that fits the loss rule, nothing at 0; all at 100 % only where all is supervised."
    return Figure(title, healthy, svg, ("supervised", "rows", "share"), table, odd=odd)


def _bars(
    title: str,
    description: str,
    x: Scale,
    edges: Sequence[tuple[float, float]],
    counts: Sequence[int],
    hints: Sequence[str],
    x_label: str,
) -> str:
    canvas = Canvas(_HEIGHT, title, description)
    y = Scale(0, max(*counts, 1) * 1.05, _BOTTOM, TOP, whole=True)
    canvas.frame(x, y, x_label, "rows")
    for (low, high), rows, hint in zip(edges, counts, hints, strict=True):
        if rows:
            top = min(y.at(rows), _BOTTOM - 1.2)
            canvas.box(x.at(low) + 0.5, top, max(x.at(high) - x.at(low) - 1, 1), _BOTTOM - top, "bar", hint)
    return canvas.markup()
