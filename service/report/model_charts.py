"""Charts of agreement with the model: the logit check's readings, and the canary's numbers by layer."""

import math
from collections.abc import Sequence
from itertools import pairwise

from schemas.dataset.manifest import CanaryReport
from service.proof.logit_check import MOST_SIGMAS, LogitReading
from service.proof.tally import JobTally
from service.report.canvas import TOP, WIDTH, Canvas, Scale, spanning
from service.report.figure import Figure
from service.report.wording import count, number, percent, short

_WORST = 10
_BOTTOM, _HEIGHT = 206.0, 240.0
_LEAST = 1e-9
"""What the canary's distances are drawn as at least: a cosine of exactly 1 has no place on a log axis."""


def _readings(tally: JobTally) -> list[LogitReading]:
    """Return the rows to draw; faults last, so that they lie on top. What is not finite has no place."""
    kept = [*tally.points.items(), *tally.faulty_points.items()]
    return [reading for reading in kept if math.isfinite(reading.engine) and math.isfinite(reading.stored)]


def _sigmas(reading: LogitReading) -> float:
    return (reading.stored - reading.engine) / reading.sigma if reading.sigma > 0 else 0.0


def _dots(canvas: Canvas, x: Scale, y: Scale, places: Sequence[tuple[LogitReading, float]]) -> None:
    """Draw a dot for each reading at the height paired with it."""
    for reading, height in places:
        kind = "bad" if reading.fault else "s0" if reading.agrees else "odd"
        hint = f"{reading.where}: {number(_sigmas(reading))} sigmas" if reading.fault else ""
        canvas.dot(x.at(reading.engine), y.at(height), 3, f"point {kind}", hint)


def agreement(tally: JobTally) -> Figure:
    """Return what the engine said of the next token against what the stored states say, as `LogitReading`."""
    title = "Next token: engine against stored states"
    canvas = Canvas(_HEIGHT, title, "What the engine said against what the stored state says, a dot a row.")
    shown = _readings(tally)
    x = spanning([value for one in shown for value in (one.engine, one.stored)], 44, WIDTH - 12)
    y = Scale(x.low, x.high, _BOTTOM, TOP)
    canvas.frame(x, y, "by the engine, nats", "by the stored states, nats")
    canvas.path([(x.start, y.start), (x.stop, y.stop)], "same")
    _dots(canvas, x, y, [(reading, reading.stored) for reading in shown])
    worst = sorted(shown, key=lambda reading: abs(reading.engine - reading.stored), reverse=True)[:_WORST]
    rows = tuple(
        (
            one.where,
            *map(number, (one.engine, one.stored, one.stored - one.engine)),
            "no" if one.fault else "yes",
        )
        for one in worst
    )
    header = ("the largest differences", "engine", "stored states", "difference", "explained by rounding")
    healthy = "every dot on the diagonal. Orange: rounding chose another token. Red: not what the engine saw."
    agree = sum(reading.agrees for reading in shown)
    share = percent(agree / max(len(shown), 1))
    fact = (
        f"{count(agree)} of the {count(len(shown))} rows drawn ({share}) agree on the most likely token. A "
        "dot is how far one of the engine's 16 tokens is below the most likely one, the token that is "
        "farthest off; in datasets of version 0.1 it is the log-probability of the most likely token."
    )
    return Figure(title, healthy, canvas.markup(), header, rows, fact)


def residuals(tally: JobTally) -> Figure:
    """Return the differences in deviations that rounding explains, with the band that a row must keep to."""
    title = "The difference, in units of rounding"
    canvas = Canvas(
        _HEIGHT, title, "Difference of the log-probabilities over what rounding explains, a dot a row."
    )
    shown = _readings(tally)
    y = Scale(-1.4 * MOST_SIGMAS, 1.4 * MOST_SIGMAS, _BOTTOM, TOP)
    x = spanning([reading.engine for reading in shown], 44, WIDTH - 12)
    canvas.box(x.start, y.at(MOST_SIGMAS), x.stop - x.start, y.at(-MOST_SIGMAS) - y.at(MOST_SIGMAS), "band")
    canvas.frame(x, y, "by the engine, nats", "difference, sigmas that rounding explains")
    canvas.text(x.stop - 4, y.at(MOST_SIGMAS) + 13, f"allowed: \u00b1{MOST_SIGMAS:.1f}", anchor="end")
    _dots(canvas, x, y, [(reading, _sigmas(reading)) for reading in shown])
    edges = (0.0, 1.0, 3.0, MOST_SIGMAS, math.inf)
    names = ("below 1", "1 to 3", f"3 to {MOST_SIGMAS:.1f}", f"above {MOST_SIGMAS:.1f}")
    sizes = [abs(_sigmas(reading)) for reading in shown]
    rows = tuple(
        (name, count(sum(low <= size < high for size in sizes)))
        for name, (low, high) in zip(names, pairwise(edges), strict=True)
    )
    healthy = (
        "a thin cloud around 0, deep inside the band; a cloud that is off as a whole fails too, even inside. "
        "What lies beyond the field is drawn at its edge."
    )
    faults = sum(reading.fault is not None for reading in shown)
    odd = f"Rows drawn that are not what the engine saw: {count(faults)}" if faults else ""
    return Figure(title, healthy, canvas.markup(), ("sigmas", "rows drawn"), rows, odd=odd)


def canary(report: CanaryReport) -> Figure:
    """Return the canary's two distances by layer."""
    layers = report.layers
    title = "Canary: distance to the reference model"
    canvas = Canvas(262, title, "1 - cosine and the largest relative error of every captured layer.")
    angles = [max(1 - layer.cosine, _LEAST) for layer in layers]
    errors = [max(layer.max_rel_error, _LEAST) for layer in layers]
    y = spanning([*angles, *errors], 206, TOP, log=True)
    ids = [layer.layer_id for layer in layers]
    x = Scale(min(ids) - 0.5, max(ids) + 0.5, 44, WIDTH - 8, whole=True)
    canvas.frame(x, y, "layer id", "distance to the reference (log scale)")
    for kind, values in (("s0", angles), ("s4", errors)):
        known = [(k, value) for k, value in zip(ids, values, strict=True) if math.isfinite(value)]
        if known:
            canvas.path([(x.at(k), y.at(value)) for k, value in known], f"line {kind}")
        for k, value in known:
            canvas.dot(x.at(k), y.at(value), 3, f"dot {kind}", f"layer {k}: {number(value)}")
    canvas.legend((("dot s0", "1 - cosine"), ("dot s4", "largest relative error")))
    rows = tuple(
        (str(one.layer_id), f"{one.cosine:.6f}", number(one.max_rel_error), str(one.best_match_layer))
        for one in layers
    )
    header = ("layer", "cosine", "largest relative error", "nearest layer of the reference")
    healthy = "both far below 1, rising slowly with depth; the nearest layer is the layer itself."
    lost = [str(one.layer_id) for one in layers if one.best_match_layer != one.layer_id]
    odd = f"Layers that are nearer to another one of the reference: {', '.join(lost)}." if lost else ""
    reference = f"a forward pass by {short(report.reference)}" if report.reference else "the reference"
    fact = f"{count(report.prompts)} prompts of {count(report.tokens)} tokens against {reference}."
    return Figure(title, healthy, canvas.markup(), header, rows, fact, odd)
