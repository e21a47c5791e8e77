"""An SVG drawing with axes, made of elements, so that every text in it is escaped. Pure.

SVG of our own and no plotting library: a page must look right in light and dark, on paper and on a phone.
Inline SVG takes colours from the page's style sheet and text from its fonts, stays sharp, can be read aloud,
and is a few KB a chart. matplotlib would fix colours and fonts when it draws, outline or embed the letters,
and put 30 MB into the image; what it draws better (contours, projections) is not needed here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

WIDTH = 400.0
"""Of every drawing. On a phone a unit is about a pixel."""
TOP = 25.0
"""Where a field begins, below the label of its vertical axis."""
_MIN_TICKS = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data from `low`..`high` to `start`..`stop` on the drawing.

    `log` is a logarithmic axis, `whole` one of whole numbers.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    whole: bool = False

    def at(self, value: float) -> float:
        """Return where `value` lies, at an end if it is outside."""
        low, high, value = (
            math.log10(v) if self.log else v for v in (self.low, self.high, self._inside(value))
        )
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round numbers inside, ascending."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high, whole=self.whole)

    def _inside(self, value: float) -> float:
        return min(max(value, self.low), self.high)


def spanning(values: Sequence[float], start: float, stop: float, *, log: bool = False) -> Scale:
    """Return a scale that holds the finite `values` with a margin; above 0 only, where it is logarithmic."""
    inside = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not inside:
        return Scale(0.1, 10.0, start, stop, log) if log else Scale(0.0, 1.0, start, stop)
    low, high = min(inside), max(inside)
    if log:
        margin = max((high / low) ** 0.06, 1.3)
        return Scale(low / margin, high * margin, start, stop, log)
    margin = (high - low) * 0.06 or 0.5
    return Scale(low - margin, high + margin, start, stop)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    rough = max((high - low) / 5, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors, every in (((1,), (last - first) // 7 + 1), ((1, 2, 5), 1), (range(1, 10), 1)):
        powers = [10.0**power for power in range(first, last + 1) if power % every == 0]
        found = [power * factor for power in powers for factor in factors if low <= power * factor <= high]
        if len(found) >= _MIN_TICKS:
            return found
    return _ticks(low, high)


def tick_text(value: float) -> str:
    """Return a number as an axis shows it: `0.02`, `5`, `2k`, `1e7`."""
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value / 1000:g}k" if size >= 1000 else f"{value:.6g}"


class Canvas:
    """A drawing of `WIDTH` by `height`; (0, 0) is its upper left corner. Classes are the style sheet's."""

    def __init__(self, height: float, title: str, description: str) -> None:
        """Begin a drawing that says what it shows to those who cannot see it."""
        about = {
            "viewBox": f"0 0 {WIDTH:g} {height:g}",
            "role": "img",
            "aria-label": f"{title}. {description}",
        }
        self._svg = ElementTree.Element("svg", about)
        self._height = height

    def markup(self) -> str:
        """Return the drawing's element."""
        return ElementTree.tostring(self._svg, encoding="unicode")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, hint: str = "") -> None:
        """Draw a straight line; `hint` is shown by a resting pointer."""
        self._add("line", kind, hint, x1=x1, y1=y1, x2=x2, y2=y2)

    def box(self, x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> None:
        """Fill a rectangle."""
        self._add("rect", kind, hint, x=x, y=y, width=width, height=height)

    def dot(self, x: float, y: float, radius: float, kind: str, hint: str = "") -> None:
        """Fill a circle."""
        self._add("circle", kind, hint, cx=x, cy=y, r=radius)

    def path(self, points: Sequence[tuple[float, float]], kind: str, *, closed: bool = False) -> None:
        """Join points by lines."""
        moves = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        ElementTree.SubElement(self._svg, "path", {"class": kind, "d": f"M{moves}{'Z' if closed else ''}"})

    def text(self, x: float, y: float, text: str, kind: str = "tick", anchor: str = "start") -> None:
        """Write on the base line `y`; `anchor` is start, middle or end."""
        self._add("text", kind, x=x, y=y, anchor=anchor).text = text

    def frame(self, x: Scale, y: Scale, x_label: str, y_label: str) -> None:
        """Draw grid, tick labels and axis labels around the field that two scales span."""
        for value in y.ticks():
            at = y.at(value)
            self.line(x.start, at, x.stop, at, "grid")
            self.text(x.start - 5, at + 3.5, tick_text(value), anchor="end")
        self.text(2, y.stop - 10, y_label, "axis")
        self.x_axis(x, y.start, x_label)

    def x_axis(self, x: Scale, bottom: float, label: str) -> None:
        """Draw a horizontal axis with its ticks, leaving out those that would touch."""
        self.line(x.start, bottom, x.stop, bottom, "base")
        free_from = 0.0
        for value in x.ticks():
            at, text = x.at(value), tick_text(value)
            if at - 3.2 * len(text) >= free_from:
                self.text(at, bottom + 14, text, anchor="middle")
                free_from = at + 3.2 * len(text) + 5
            self.line(at, bottom, at, bottom + 3, "base")
        self.text(x.stop, bottom + 29, label, "axis", "end")

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """Write at the lower edge what the marks of a kind mean."""
        at, middle = 44.0, self._height - 6
        for kind, meaning in entries:
            if kind.startswith("dot"):
                self.dot(at + 3, middle, 3, kind)
            else:
                self.line(at, middle, at + 6, middle, kind)
            self.text(at + 12, middle + 3.5, meaning)
            at += 28 + 5.8 * len(meaning)

    def _add(
        self, tag: str, kind: str, hint: str = "", *, anchor: str = "start", **places: float
    ) -> ElementTree.Element:
        about = {"class": kind} | {name: f"{place:.1f}" for name, place in places.items()}
        if anchor != "start":
            about["text-anchor"] = anchor
        element = ElementTree.SubElement(self._svg, tag, about)
        if hint:
            ElementTree.SubElement(element, "title").text = hint
        return element
