"""A chart: two axes and the marks between them; `chart.html` draws it as inline SVG. Pure.

We write SVG without a plotting library: a page must look right in light and dark mode, on paper and on a
phone. Inline SVG takes colours from the page's style sheet and text from its fonts, stays sharp, works with
screen readers, and takes a few KB per chart. matplotlib would fix colours and fonts when drawing, outline or
embed the letters, and add 30 MB to the container image; what it draws better (contours, projections) is not
needed here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from service.report.wording import number

WIDTH = 400.0
"""Width of every drawing. On a phone a unit is about a pixel."""
TOP = 25.0
"""Where the plot area begins, below the label of the vertical axis."""
_MIN_TICKS = 3
_HALF_LETTER = 3.2


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps data from `low`..`high` to `start`..`stop` on the drawing.

    `log` makes the axis logarithmic, `whole` limits ticks to whole numbers; `names` are the labels of 0, 1,
    2...
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    whole: bool = False
    names: tuple[str, ...] | None = None

    def at(self, value: float) -> float:
        """Return the position of `value`, clipped to the axis."""
        inside = min(max(value, self.low), self.high)
        low, high, inside = (math.log10(v) if self.log else v for v in (self.low, self.high, inside))
        return self.start + (inside - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round numbers within the axis, ascending."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high, whole=self.whole)

    def labels(self) -> list[tuple[float, str]]:
        """Return the position and label of each tick."""
        if self.names is not None:
            return [(self.at(tick), name) for tick, name in enumerate(self.names)]
        return [(self.at(tick), tick_text(tick)) for tick in self.ticks()]

    def spaced_labels(self) -> Iterator[tuple[float, str]]:
        """Yield `labels` for a horizontal axis, with an empty text if it would touch another label."""
        free_from = 0.0
        for at, text in self.labels():
            half = _HALF_LETTER * len(text)
            fits = at - half >= free_from
            free_from = at + half + 5 if fits else free_from
            yield at, text if fits else ""


def spanning(values: Sequence[float], start: float, stop: float, *, log: bool = False) -> Axis:
    """Return an axis that spans the finite `values` (if logarithmic, only positive ones) with a margin."""
    inside = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not inside:
        return Axis(0.1, 10.0, start, stop, log) if log else Axis(0.0, 1.0, start, stop)
    low, high = min(inside), max(inside)
    if log:
        margin = max((high / low) ** 0.06, 1.3)
        return Axis(low / margin, high * margin, start, stop, log)
    margin = (high - low) * 0.06 or 0.5
    return Axis(low - margin, high + margin, start, stop)


def round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    step = round_step(max((high - low) / 5, 1.0 if whole else 0.0))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors, every in (((1,), (last - first) // 7 + 1), ((1, 2, 5), 1), (range(1, 10), 1)):
        powers = [10.0**power for power in range(first, last + 1) if power % every == 0]
        inside = [power * factor for power in powers for factor in factors if low <= power * factor <= high]
        if len(inside) >= _MIN_TICKS:
            return inside
    return _ticks(low, high)


def tick_text(value: float) -> str:
    """Return a number formatted for an axis: `0.02`, `5`, `2k`, `1e7`."""
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value / 1000:g}k" if size >= 1000 else f"{value:.6g}"


@dataclass(frozen=True, slots=True)
class Mark:
    """One SVG element. `hint` is its tooltip."""

    tag: str
    attributes: Mapping[str, str]
    text: str
    hint: str


@dataclass(slots=True)
class Chart:
    """A drawing of `WIDTH` by `height`; (0, 0) is the upper left corner. All text is plain.

    `rows` are its numbers as a table. `band`, if not 0, is the range around 0 within which values should be.
    """

    height: float
    x: Axis
    y: Axis
    marks: list[Mark] = field(default_factory=list)
    rows: Sequence[tuple[str, ...]] = ()
    band: float = 0.0

    def mark(self, tag: str, kind: str, text: str = "", hint: str = "", **places: float | str) -> None:
        """Add an element with the attributes `places`; `kind` is its CSS class."""
        texts = {name: at if isinstance(at, str) else f"{at:.1f}" for name, at in places.items()}
        self.marks.append(Mark(tag, {"class": kind} | texts, text, hint))

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        self.mark("path", kind, d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points))

    def line(
        self, values: Mapping[int, float], kind: str, name: str = "", radius: float = 3, *, dots: bool = True
    ) -> None:
        """Draw a line through values, with a dot at each if `dots`; hints have `name` and the x value."""
        if values:
            self.path([(self.x.at(x), self.y.at(y)) for x, y in values.items()], f"line {kind}")
        for x, y in values.items() if dots else ():
            hint = f"{name} {x}: {number(y)}" if name else ""
            self.mark("circle", f"dot {kind}", hint=hint, cx=self.x.at(x), cy=self.y.at(y), r=radius)
