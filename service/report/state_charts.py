"""Charts of the states' size: each layer's distribution, its growth with depth, and along a row.

Legend: P places in a row, B bins.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from service.proof.layer_tally import BINS, PLACES, LayerTally, bin_edge, place_begin
from service.report.canvas import TOP, WIDTH, Canvas, Scale, spanning, tick_text
from service.report.figure import Figure
from service.report.wording import count, number

Layers = Mapping[int, LayerTally]
"""By layer id, ascending."""

_LEFT, _RIGHT = 56.0, WIDTH - 58
_GUTTER = 13.0
_MIN_BINS, _MAX_BARS = 16, 90
_MAX_LINES = 6
_RIDGE_HEIGHT, _LEAST_HILL, _HIGHEST_HILL = 570.0, 13.0, 140.0
"""About as high as two charts with their words; a layer gets its share of it, within bounds."""
_MIN_TALL_LAYERS = 4
_FILLED = 0.92
_HAIRLINE = 2.0


def rms_text(value: float) -> str:
    """Return a root mean square in words."""
    return "out of bounds" if value == math.inf else number(value)


def ridge(layers: Layers) -> Figure:
    """Return one histogram a layer over a common axis of root mean squares."""
    height = min(max(_RIDGE_HEIGHT / len(layers), _LEAST_HILL), _HIGHEST_HILL)
    top, bottom = 14.0, 14.0 + height * len(layers) + 6
    title = "Size of the states, layer by layer"
    canvas = Canvas(bottom + 34, title, "One histogram a layer; the numbers stand in the table of layers.")
    edges = _edges(layers)
    scale = Scale(edges[0][1], edges[-1][1], _LEFT + _GUTTER, _RIGHT - _GUTTER, log=True)
    for value in scale.ticks():
        canvas.line(scale.at(value), top, scale.at(value), bottom, "grid")
    canvas.text(WIDTH - 2, 9, "median", "axis", "end")
    for place, (layer_id, layer) in enumerate(layers.items()):
        base = top + height * (place + 1)
        canvas.text(2, base - 3, f"layer {layer_id}", "label")
        (median,) = layer.rms((0.5,))
        canvas.text(WIDTH - 2, base - 3, rms_text(median), "label", "end")
        _ridge_row(canvas, scale, layer, edges, base, height * _FILLED)
        if 0 < median < math.inf:
            canvas.line(scale.at(median), base, scale.at(median), base - height * 0.45, "median")
    canvas.x_axis(scale, bottom, "RMS of a token's state (log scale)")
    header = ("layer", "tokens measured", "5 % below", "25 %", "median", "75 %", "95 %")
    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    rows = tuple(
        (str(k), count(layer.tokens), *map(rms_text, layer.rms(shares))) for k, layer in layers.items()
    )
    healthy = (
        "one narrow hill a layer, moving right with depth; a few tokens far to the right are the first of "
        "their rows. Red at the left edge are all-zero tokens, at the right edge infinite ones."
    )
    wrong = [
        f"layer {layer_id}: {count(tokens)} tokens {what}"
        for layer_id, layer in layers.items()
        for what, tokens in layer.faults(layer_id).items()
    ]
    return Figure(
        title,
        healthy,
        canvas.markup(),
        header,
        rows,
        odd="; ".join(wrong),
        tall=len(layers) >= _MIN_TALL_LAYERS,
    )


def _edges(layers: Layers) -> list[tuple[int, float]]:
    """Return the numbers of the bins at which bars begin, and the root mean square there; the last ends it.

    They span all that was counted, and at least a few bins.
    """
    counts_B = sum((layer.counts_PB.sum(axis=0) for layer in layers.values()), np.zeros(BINS, np.int64))
    used = np.flatnonzero(counts_B[1:-1]) + 1
    first, last = (int(used[0]), int(used[-1])) if len(used) else (BINS // 3, BINS // 3)
    missing = max(0, _MIN_BINS - (last - first)) // 2 + 1
    first, last = max(1, first - missing), min(BINS - 2, last + missing)
    step = -(-(last + 1 - first) // _MAX_BARS)
    numbers = [*range(first, last + 1, step), last + 1]
    return [(number, bin_edge(number)) for number in numbers]


def _ridge_row(
    canvas: Canvas,
    scale: Scale,
    layer: LayerTally,
    edges: Sequence[tuple[int, float]],
    base: float,
    height: float,
) -> None:
    """Draw one histogram as high as `height`; a bar's area is its tokens, but at least a hairline high."""
    counts_B = layer.counts_PB.sum(axis=0)
    bars = []
    for (begin, low), (end, high) in pairwise(edges):
        left, right = scale.at(low), scale.at(high)
        bars.append((left, right, int(counts_B[begin:end].sum()) / (right - left)))
    tallest = max(density for *_, density in bars) or 1.0
    outline = [(scale.start, base)]
    for left, right, density in bars:
        level = base - max(height * density / tallest, _HAIRLINE if density else 0.0)
        outline += [(left, level), (right, level)]
    canvas.path([*outline, (scale.stop, base)], "hill", closed=True)
    for tokens, where, what in (
        (layer.zero, _LEFT, "all zero"),
        (layer.not_finite, _RIGHT - _GUTTER + 4, "not finite"),
    ):
        if tokens:
            canvas.box(
                where, base - height / 2, _GUTTER - 4, height / 2, "bad", f"{count(tokens)} tokens {what}"
            )


def growth(layers: Layers) -> Figure:
    """Return median, spread and largest magnitude by layer."""
    spread = {k: layer.rms((0.05, 0.5, 0.95)) for k, layer in layers.items()}
    title = "Growth with depth"
    canvas = Canvas(262, title, "Median and spread of the root mean square by layer, and the largest value.")
    every = [value for values in spread.values() for value in values]
    y = spanning([*every, *(layer.max_abs for layer in layers.values())], 206, TOP, log=True)
    x = Scale(min(layers) - 0.5, max(layers) + 0.5, 44, WIDTH - 8, whole=True)
    canvas.frame(x, y, "layer id (decoder layers passed)", "RMS of a token's state (log scale)")
    for layer_id, (low, _, high) in spread.items():
        if low < math.inf and high > 0:
            canvas.line(x.at(layer_id), y.at(low), x.at(layer_id), y.at(high), "spread")
    middles = [(k, middle) for k, (_, middle, _) in spread.items() if 0 < middle < math.inf]
    if middles:
        canvas.path([(x.at(k), y.at(middle)) for k, middle in middles], "line s0")
    for layer_id, middle in middles:
        canvas.dot(x.at(layer_id), y.at(middle), 3, "dot s0", f"layer {layer_id}: median {number(middle)}")
    for layer_id, layer in layers.items():
        if layer.max_abs > 0:
            hint = f"layer {layer_id}: largest magnitude {number(layer.max_abs)}"
            at, height = x.at(layer_id), y.at(layer.max_abs)
            canvas.line(at - 3, height, at + 3, height, "largest", hint)
    canvas.legend((("dot s0", "median"), ("spread", "5 to 95 %"), ("largest", "largest |value|")))
    header = ("layer", "5 % below", "median", "95 % below", "largest |value|")
    rows = tuple((str(k), *map(rms_text, spread[k]), number(layers[k].max_abs)) for k in layers)
    healthy = "the median rises smoothly; a fall, a jump or a flat pair asks for a look at the layer ids."
    return Figure(title, healthy, canvas.markup(), header, rows)


def places(layers: Layers) -> Figure:
    """Return the median root mean square by place in the row, a line for some of the layers."""
    medians = {k: _by_place(layer) for k, layer in layers.items()}
    shown = _evenly(list(layers), _MAX_LINES)
    used = max((place for values in medians.values() for place in values), default=0)
    title = "Along the row"
    canvas = Canvas(236, title, "Median root mean square of the tokens at each place of a row, by layer.")
    y = spanning([value for k in shown for value in medians[k].values()], 192, TOP, log=True)
    x = Scale(0, max(used, 1), 44, WIDTH - 62)
    for value in y.ticks():
        canvas.line(x.start, y.at(value), x.stop, y.at(value), "grid")
        canvas.text(x.start - 5, y.at(value) + 3.5, tick_text(value), anchor="end")
    canvas.text(2, TOP - 10, "median RMS of a token's state (log scale)", "axis")
    canvas.line(x.start, 192, x.stop, 192, "base")
    for place in range(used + 1):
        if place % 2 == 0 or used < PLACES // 2:
            canvas.text(x.at(place), 206, tick_text(place_begin(place)), anchor="middle")
    canvas.text(x.stop, 221, "token number in the row (from 4 on: octaves)", "axis", "end")
    free_above = math.inf
    ends = sorted(
        ((y.at(list(medians[k].values())[-1]), k) for k in shown if medians[k]), key=lambda end: -end[0]
    )
    for at, layer_id in ends:
        kind = f"s{shown.index(layer_id)}"
        points = [(x.at(place), y.at(value)) for place, value in medians[layer_id].items()]
        canvas.path(points, f"line {kind}")
        for here in points:
            canvas.dot(*here, 2, f"dot {kind}")
        free_above = min(at + 3.5, free_above - 12)
        canvas.text(points[-1][0] + 7, free_above, f"layer {layer_id}", f"label {kind}")
    header = ("from token", *(f"layer {k}" for k in layers))
    rows = tuple(
        (count(place_begin(place)), *(number(medians[k].get(place)) for k in layers))
        for place in range(used + 1)
    )
    healthy = (
        "flat, except that many models put massive values on the first token or two (a tower at the "
        "left); rows that begin in the middle of another's have none."
    )
    return Figure(title, healthy, canvas.markup(), header, rows)


def _by_place(layer: LayerTally) -> dict[int, float]:
    """Return the median at each place that has tokens, where it is neither zero nor infinite."""
    found = {place: layer.rms((0.5,), place)[0] for place in range(PLACES)}
    return {place: median for place, median in found.items() if 0 < median < math.inf}


def _evenly(layer_ids: list[int], most: int) -> list[int]:
    """Return at most `most` layers, the first and the last among them."""
    if len(layer_ids) <= most:
        return layer_ids
    return [layer_ids[round(place * (len(layer_ids) - 1) / (most - 1))] for place in range(most)]
