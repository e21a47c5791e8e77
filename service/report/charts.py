"""The charts of one job: the magnitude of its states, agreement with the model, and statistics of its rows.

Captions are in `page.html`. Legend: P places in a row, B bins.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from schemas.dataset.manifest import CanaryReport
from service.proof.layer_tally import BINS, PLACES, LayerTally, bin_edge, place_begin
from service.proof.logit_check import MOST_SIGMAS, LogitReading
from service.proof.tally import SHARE_BINS, JobTally
from service.report.chart import TOP, WIDTH, Axis, Chart, round_step, spanning, tick_text
from service.report.wording import count, number, percent, rms_text

Layers = Mapping[int, LayerTally]
"""By layer id, ascending."""

_LEFT, _RIGHT = 56.0, WIDTH - 58
_GUTTER = 13.0
_MIN_BINS, _MAX_BARS = 16, 90
_MAX_LINES = 6
_RIDGE_HEIGHT, _LEAST_HILL, _HIGHEST_HILL = 570.0, 13.0, 140.0
"""About as high as two charts with captions; each layer gets its share, within limits."""
_FILLED = 0.92
_HAIRLINE = 2.0
_WORST_READINGS = 10
_LEAST_DISTANCE = 1e-9
"""Minimum distance drawn for the canary: a cosine of exactly 1 cannot be shown on a log axis."""
_MOST_DISTANCE = 1e30
"""Larger ones are in the table alone."""
_LENGTH_BARS = 48


def ridge(layers: Layers) -> Chart:
    """Return one histogram per layer over a common axis of root mean squares."""
    height = min(max(_RIDGE_HEIGHT / len(layers), _LEAST_HILL), _HIGHEST_HILL)
    top, bottom = 14.0, 14.0 + height * len(layers) + 6
    edges = _edges(layers)
    x = Axis(edges[0][1], edges[-1][1], _LEFT + _GUTTER, _RIGHT - _GUTTER, log=True)
    chart = Chart(bottom + 34, x, Axis(0, 1, bottom, top, names=()))
    for at, _ in x.labels():
        chart.mark("line", "grid", x1=at, x2=at, y1=top, y2=bottom)
    chart.mark("text", "axis end", "median", x=WIDTH - 2, y=9)
    for place, (layer_id, layer) in enumerate(layers.items()):
        base = top + height * (place + 1)
        chart.mark("text", "label", f"layer {layer_id}", x=2, y=base - 3)
        (median,) = layer.rms((0.5,))
        chart.mark("text", "label end", rms_text(median), x=WIDTH - 2, y=base - 3)
        _hill(chart, layer, edges, base, height * _FILLED)
        if 0 < median < math.inf:
            chart.mark("line", "median", x1=x.at(median), x2=x.at(median), y1=base, y2=base - height * 0.45)
    return chart


def _edges(layers: Layers) -> list[tuple[int, float]]:
    """Return (bin number, root mean square) for the start of each bar, and for the end of the last one.

    They span all counted values, and at least a few bins.
    """
    counts_B = sum((layer.counts_PB.sum(axis=0) for layer in layers.values()), np.zeros(BINS, np.int64))
    used = np.flatnonzero(counts_B[1:-1]) + 1
    first, last = (int(used[0]), int(used[-1])) if len(used) else (BINS // 3, BINS // 3)
    missing = max(0, _MIN_BINS - (last - first)) // 2 + 1
    first, last = max(1, first - missing), min(BINS - 2, last + missing)
    step = -(-(last + 1 - first) // _MAX_BARS)
    numbers = [*range(first, last + 1, step), last + 1]
    return [(number, bin_edge(number)) for number in numbers]


def _hill(
    chart: Chart, layer: LayerTally, edges: Sequence[tuple[int, float]], base: float, height: float
) -> None:
    """Draw a histogram of height `height`; a bar's area is proportional to tokens, at least a hairline."""
    counts_B = layer.counts_PB.sum(axis=0)
    bars = []
    for (begin, low), (end, high) in pairwise(edges):
        left, right = chart.x.at(low), chart.x.at(high)
        bars.append((left, right, int(counts_B[begin:end].sum()) / (right - left)))
    tallest = max(density for *_, density in bars) or 1.0
    outline = [(chart.x.start, base)]
    for left, right, density in bars:
        level = base - max(height * density / tallest, _HAIRLINE if density else 0.0)
        outline += [(left, level), (right, level)]
    chart.path([*outline, (chart.x.stop, base), outline[0]], "hill")
    wrong = (
        (_LEFT, layer.zero, "all zero"),
        (_RIGHT - _GUTTER + 4, layer.not_finite, "not finite"),
    )
    for left, tokens, fault in wrong:
        if tokens:
            hint = f"{count(tokens)} tokens {fault}"
            chart.mark(
                "rect", "bad", "", hint, x=left, y=base - height / 2, width=_GUTTER - 4, height=height / 2
            )


def _by_layer(layer_ids: Sequence[int], values: Sequence[float]) -> Chart:
    """Return an empty chart of values by layer id."""
    x = Axis(min(layer_ids) - 0.5, max(layer_ids) + 0.5, 44, WIDTH - 8, whole=True)
    return Chart(262, x, spanning(values, 206, TOP, log=True))


def growth(layers: Layers) -> Chart:
    """Return a chart of median, spread and largest magnitude by layer."""
    spread = {k: layer.rms((0.05, 0.5, 0.95)) for k, layer in layers.items()}
    values = [value for sizes in spread.values() for value in sizes]
    chart = _by_layer(list(layers), [*values, *(layer.max_abs for layer in layers.values())])
    x, y = chart.x, chart.y
    for k, (low, _, high) in spread.items():
        if low < math.inf and high > 0:
            chart.mark("line", "spread", x1=x.at(k), x2=x.at(k), y1=y.at(low), y2=y.at(high))
    medians = {k: median for k, (_, median, _) in spread.items() if 0 < median < math.inf}
    chart.line(medians, "s0", "median of layer")
    for k, layer in layers.items():
        if layer.max_abs > 0:
            hint = f"layer {k}: largest magnitude {number(layer.max_abs)}"
            level = y.at(layer.max_abs)
            chart.mark("line", "largest", hint=hint, x1=x.at(k) - 3, x2=x.at(k) + 3, y1=level, y2=level)
    return chart


def places(layers: Layers) -> Chart:
    """Return a chart of the median root mean square by place in the row, with a line for some layers."""
    medians = {k: _by_place(layer) for k, layer in layers.items()}
    used = max((place for values in medians.values() for place in values), default=0)
    steps = np.linspace(0, len(layers) - 1, min(len(layers), _MAX_LINES)).round().astype(int)
    shown = [list(layers)[step] for step in steps]
    names = tuple(tick_text(place_begin(place)) for place in range(used + 1))
    y = spanning([value for k in shown for value in medians[k].values()], 192, TOP, log=True)
    chart = Chart(236, Axis(0, max(used, 1), 44, WIDTH - 62, names=names), y)
    for number_shown, k in enumerate(shown):
        chart.line(medians[k], f"s{number_shown}", radius=2)
    ends = [(*list(medians[k].items())[-1], k) for k in shown if medians[k]]
    free_above = math.inf
    for place, value, k in sorted(ends, key=lambda end: end[1]):
        free_above = min(y.at(value) + 3.5, free_above - 12)
        kind = f"label s{shown.index(k)}"
        chart.mark("text", kind, f"layer {k}", x=chart.x.at(place) + 7, y=free_above)
    chart.rows = [
        (count(place_begin(place)), *(number(medians[k].get(place)) for k in layers))
        for place in range(used + 1)
    ]
    return chart


def _by_place(layer: LayerTally) -> dict[int, float]:
    """Return the median at each place, where there are tokens and it is neither zero nor infinite."""
    medians = {place: layer.rms((0.5,), place)[0] for place in range(PLACES)}
    return {place: median for place, median in medians.items() if 0 < median < math.inf}


def readings(tally: JobTally) -> list[LogitReading]:
    """Return the readings to draw, faults last so that they are on top. Non-finite ones cannot be drawn."""
    kept = [*tally.points.items(), *tally.faulty_points.items()]
    return [reading for reading in kept if math.isfinite(reading.engine) and math.isfinite(reading.stored)]


def _sigmas(reading: LogitReading) -> float:
    return (reading.stored - reading.engine) / reading.sigma if reading.sigma > 0 else 0.0


def _dots(chart: Chart, places: Sequence[tuple[LogitReading, float]]) -> None:
    """Draw a dot for each reading at its paired height."""
    for reading, height in places:
        kind = "bad" if reading.fault else "s0" if reading.agrees else "odd"
        hint = f"{reading.where}: {number(_sigmas(reading))} sigmas" if reading.fault else ""
        at = chart.x.at(reading.engine)
        chart.mark("circle", f"point {kind}", hint=hint, cx=at, cy=chart.y.at(height), r=3)


def agreement(shown: Sequence[LogitReading]) -> Chart:
    """Return a chart of the log-probability gaps by the engine against those by the stored states."""
    x = spanning([value for one in shown for value in (one.engine, one.stored)], 44, WIDTH - 12)
    chart = Chart(240, x, Axis(x.low, x.high, 206, TOP))
    chart.mark("line", "same", x1=x.start, y1=206, x2=x.stop, y2=TOP)
    _dots(chart, [(reading, reading.stored) for reading in shown])
    worst = sorted(shown, key=lambda reading: abs(reading.engine - reading.stored), reverse=True)
    chart.rows = [
        (
            one.where,
            *map(number, (one.engine, one.stored, one.stored - one.engine)),
            "no" if one.fault else "yes",
        )
        for one in worst[:_WORST_READINGS]
    ]
    return chart


def residuals(shown: Sequence[LogitReading]) -> Chart:
    """Return a chart of the differences in sigmas, with the band in which a row must be."""
    x = spanning([reading.engine for reading in shown], 44, WIDTH - 12)
    y = Axis(-1.4 * MOST_SIGMAS, 1.4 * MOST_SIGMAS, 206, TOP)
    chart = Chart(240, x, y, band=MOST_SIGMAS)
    _dots(chart, [(reading, _sigmas(reading)) for reading in shown])
    names = ("below 1", "1 to 3", f"3 to {MOST_SIGMAS:.1f}", f"above {MOST_SIGMAS:.1f}")
    bins = np.digitize([abs(_sigmas(reading)) for reading in shown], (1.0, 3.0, MOST_SIGMAS)).tolist()
    chart.rows = [(name, count(bins.count(place))) for place, name in enumerate(names)]
    return chart


def canary(report: CanaryReport) -> Chart:
    """Return a chart of the canary's two distances by layer."""
    angles = {one.layer_id: max(1 - one.cosine, _LEAST_DISTANCE) for one in report.layers}
    errors = {one.layer_id: max(one.max_rel_error, _LEAST_DISTANCE) for one in report.layers}
    near = {k: value for k, value in errors.items() if value < _MOST_DISTANCE}
    chart = _by_layer(list(angles), [*angles.values(), *near.values()])
    chart.line(angles, "s0", "layer")
    chart.line(near, "s4", "layer")
    chart.rows = [
        (str(one.layer_id), f"{one.cosine:.6f}", number(one.max_rel_error), str(one.best_match_layer))
        for one in report.layers
    ]
    return chart


def lengths(tally: JobTally) -> Chart:
    """Return the histogram of rows by tokens."""
    width = int(round_step(max(1.0, max(tally.lengths) / _LENGTH_BARS)))
    known, rows = np.array(sorted(tally.lengths.items())).T
    bars = np.bincount((known - 1) // width, weights=rows).astype(int)
    chart = _histogram(bars.tolist(), width, "tokens", first=1)
    below = np.cumsum(rows)
    marks = (("shortest", 0.0), ("5 % below", 0.05), ("median", 0.5), ("95 % below", 0.95), ("longest", 1.0))
    chart.rows = [
        (name, count(known[int(np.searchsorted(below, share * below[-1]))])) for name, share in marks
    ]
    return chart


def shares(tally: JobTally) -> Chart:
    """Return the histogram of rows by supervised share, the mean of the loss mask."""
    counts, step = tally.shares.tolist(), 100 // SHARE_BINS
    chart = _histogram(counts, step, "%")
    total = max(sum(counts), 1)
    chart.rows = [
        (f"{bar * step} to {(bar + 1) * step} %", count(rows), percent(rows / total))
        for bar, rows in enumerate(counts)
        if rows
    ]
    return chart


def _histogram(counts: Sequence[int], width: int, unit: str, first: int = 0) -> Chart:
    """Return a chart with a bar for each of `counts`, `width` wide; `first` is the least possible value."""
    x = Axis(0, width * len(counts), 44, WIDTH - 12, whole=True)
    y = Axis(0, max(*counts, 1) * 1.05, 190, TOP, whole=True)
    chart = Chart(222, x, y)
    for bar, rows in enumerate(counts):
        if rows:
            low, high = bar * width, (bar + 1) * width
            hint = f"{low + first:,} to {high:,} {unit}: {rows:,} rows"
            across = max(x.at(high) - x.at(low) - 1, 1)
            top = min(y.at(rows), y.start - 1.2)
            chart.mark("rect", "bar", hint=hint, x=x.at(low) + 0.5, y=top, width=across, height=y.start - top)
    return chart
