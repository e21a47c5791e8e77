"""The charts draw the numbers: every mark is where its scale puts it, inside the drawing."""

import math
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, strategies as st

from schemas.dataset.manifest import CanaryReport, LayerAgreement
from service.proof.layer_tally import LayerTally
from service.proof.logit_check import MOST_SIGMAS, LogitReading, LogitVerdict
from service.proof.tally import JobTally
from service.report import charts
from service.report.chart import Axis, Chart, spanning, tick_text
from service.report.page import templates
from service.report.wording import rms_text
from tests.support.finished_job import a_canary

SIZES = st.floats(1e-6, 1e7)
BAD = LogitReading("row 9 (abc)", -0.5, -3.0, 0.01, False, "off", math.inf)
AGAINST_MODEL = (charts.agreement, charts.residuals)


def layer(scale: float, *, tokens: int = 200, first: float = 1.0) -> LayerTally:
    states_TH = scale * torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1))
    states_TH[0] *= first
    return with_row(LayerTally(), states_TH)


def with_row(tally: LayerTally, states_TH: torch.Tensor) -> LayerTally:
    tally.add(states_TH, *torch.aminmax(states_TH, dim=1))
    return tally


def some_layers(count: int) -> dict[int, LayerTally]:
    return {3 * number: layer(1.2**number, first=100) for number in range(count)}


def a_tally(lengths: list[int], **readings: LogitReading) -> JobTally:
    tally = JobTally()
    for length in lengths:
        tally.lengths[length] += 1
    tally.shares[14] = len(lengths)
    tally.logits("data/a", LogitVerdict(len(readings), 0, 0.0, (), tuple(readings.values())))
    return tally


def right(number: int, error: float = 0.0) -> LogitReading:
    return LogitReading(f"row {number}", -0.1 * number, -0.1 * number + error, 0.01, True, None, 0.0)


def canary(*layers: tuple[int, float, float]) -> CanaryReport:
    entries = tuple(
        LayerAgreement(layer_id=k, cosine=cosine, max_rel_error=error, best_match_layer=k)
        for k, cosine, error in layers
    )
    return a_canary().model_copy(update={"layers": entries})


def svg(chart: Chart, label: str = "a label") -> ElementTree.Element:
    """Return the chart as the page draws it."""
    macros = templates().get_template("chart.html").module
    legend = (("dot s0", 44, "meaning"), ("spread", 107, "another"))
    return ElementTree.fromstring(macros.drawing(chart, label, "below", "beside", legend))


def marks(chart: Chart, kind: str) -> list[dict[str, str]]:
    """Return the attributes of a chart's marks of one class."""
    return [mark.attrib for mark in svg(chart).iter() if kind in mark.get("class", "").split()]


def texts(chart: Chart) -> list[str]:
    return [node.text or "" for node in svg(chart).iter("text")]


def all_charts() -> list[Chart]:
    broken = with_row(with_row(layer(1.0), torch.zeros(3, 16)), torch.full((2, 16), math.inf))
    empty, layers = LayerTally(), some_layers(5)
    unknown = LogitReading("row 8", math.nan, -3.0, 0.01, False, "off", math.inf)
    many = a_tally([1, 2, 2, 4096], a=right(1), b=right(2, 0.01), c=BAD, d=unknown)
    one = a_tally([7], a=right(1))
    near, far, lost, vast = (2, 1.0, 0.0), (8, 0.9, 0.5), (9, -1.0, math.inf), (10, 0.9, 1e300)
    states = (charts.ridge, charts.growth, charts.places)
    groups = ({2: broken}, {0: empty}, {0: broken, 1: empty}, layers, some_layers(70))
    return [
        *(draw(group) for draw in states for group in groups),
        *(draw(charts.readings(tally)) for draw in AGAINST_MODEL for tally in (many, one, a_tally([1]))),
        *(draw(tally) for draw in (charts.lengths, charts.shares) for tally in (many, one)),
        charts.canary(canary(near, far, lost)),
        charts.canary(canary(near, vast)),
        charts.canary(canary(near)),
    ]


@pytest.mark.parametrize("chart", all_charts())
def test_every_mark_lies_inside_the_drawing(chart: Chart):
    drawing = svg(chart)
    _, _, width, height = map(float, drawing.attrib["viewBox"].split())
    for mark in drawing.iter():
        across = [float(mark.attrib[name]) for name in ("x", "x1", "x2", "cx") if name in mark.attrib]
        down = [float(mark.attrib[name]) for name in ("y", "y1", "y2", "cy") if name in mark.attrib]
        points = [point.split() for point in mark.get("d", "").strip("M").split("L") if point]
        across += [float(x) for x, _ in points] + [float(mark.get("x", 0)) + float(mark.get("width", 0))]
        down += [float(y) for _, y in points] + [float(mark.get("y", 0)) + float(mark.get("height", 0))]
        assert all(0 <= x <= width for x in across), mark.attrib
        assert all(0 <= y <= height for y in down), mark.attrib


@pytest.mark.parametrize("log", [False, True])
@given(values=st.lists(SIZES, min_size=1))
def test_a_scale_holds_its_values_in_their_order(log: bool, values: list[float]):
    scale = spanning(values, 10, 110, log=log)
    places = [scale.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(10 <= place <= 110 for place in places)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 14
    assert ticks == sorted(ticks)
    slack = 1e-6 * max(abs(scale.low), abs(scale.high))
    assert all(scale.low - slack <= tick <= scale.high + slack for tick in ticks)


def test_what_is_outside_a_scale_is_drawn_at_its_edge():
    scale = Axis(1, 100, 0, 100, log=True)
    assert [scale.at(value) for value in (0.0, 1, 10, 100, 1e9, math.inf)] == pytest.approx(
        [0, 0, 50, 100, 100, 100]
    )


def test_an_axis_of_whole_numbers_has_whole_ticks():
    assert Axis(1.5, 3.5, 0, 1, whole=True).ticks() == [2, 3]
    assert Axis(0, 1.05, 0, 1, whole=True).ticks() == [0, 1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.02, "0.02"),
        (5, "5"),
        (2000, "2k"),
        (1e7, "1e7"),
        (2e-5, "2e-5"),
        (-10, "-10"),
        (0.30000000000000004, "0.3"),
    ],
)
def test_ticks_are_short(value, text):
    assert tick_text(value) == text


def test_text_of_a_drawing_is_escaped():
    evil = "\"></title><script>alert('1')</script>"
    chart = Chart(10, Axis(0, 1, 0, 1), Axis(0, 1, 1, 0))
    chart.mark("text", evil, evil, evil, x=0, d=evil)
    drawing = svg(chart, evil)
    assert drawing.find(".//script") is None
    assert drawing.attrib["aria-label"] == evil
    (text,) = [node for node in drawing.iter("text") if node.text == evil]
    assert (text.attrib["class"], text.attrib["d"], text[0].text) == (evil, evil, evil)


@pytest.mark.parametrize("count", [1, 5, 70])
def test_the_ridge_has_a_hill_for_every_layer_and_says_its_median(count):
    chart = charts.ridge(some_layers(count))
    assert len(marks(chart, "hill")) == len(marks(chart, "median")) == count
    medians = [rms_text(layer.rms((0.5,))[0]) for layer in some_layers(count).values()]
    assert [text for text in texts(chart) if text in medians] == medians
    middles = [float(line["x1"]) for line in marks(chart, "median")]
    assert middles == sorted(middles)


def test_tokens_that_cannot_be_right_stand_at_the_edges_of_the_ridge():
    broken = with_row(with_row(layer(1.0), torch.zeros(3, 16)), torch.full((2, 16), math.inf))
    chart = charts.ridge({1: layer(1.0), 4: broken})
    zero, infinite = marks(chart, "bad")
    assert float(zero["x"]) < min(float(line["x1"]) for line in marks(chart, "grid"))
    assert float(infinite["x"]) > max(float(line["x1"]) for line in marks(chart, "grid"))
    hints = [title.text for title in svg(chart).iter("title")]
    assert hints == ["3 tokens all zero", "2 tokens not finite"]


def test_a_single_huge_token_can_be_seen_in_the_ridge():
    tall = layer(1.0, tokens=100_000, first=1e5)
    (hill,) = marks(charts.ridge({1: tall}), "hill")
    points = [tuple(map(float, point.split())) for point in hill["d"].strip("M").split("L")]
    base = points[0][1]
    right_most = max(x for x, y in points if y < base)
    assert [base - y for x, y in points if x == right_most and y < base] == [2.0]


def test_bars_of_equal_share_on_the_log_axis_are_equally_high():
    sizes_T1 = torch.logspace(0, 2, 100_000)[:, None]
    (hill,) = marks(charts.ridge({1: with_row(LayerTally(), sizes_T1)}), "hill")
    heights = [float(point.split()[1]) for point in hill["d"].strip("M").split("L")]
    base = heights[0]
    inner = [base - height for height in heights if base - height > 10]
    assert len(inner) > 50
    assert max(inner) < 1.2 * sorted(inner)[len(inner) // 2]
    assert sorted(inner)[4] > 0.8 * sorted(inner)[len(inner) // 2]


def test_growth_draws_every_layers_median_and_largest_value():
    layers = some_layers(6)
    chart = charts.growth(layers)
    heights = [float(dot["cy"]) for dot in marks(chart, "dot")[:6]]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 6
    assert len(marks(chart, "largest")) == 6


def test_massive_first_tokens_tower_at_the_left():
    chart = charts.places({1: layer(1.0, first=1000.0)})
    first, *rest = (float(dot["cy"]) for dot in marks(chart, "dot"))
    assert first < min(rest) - 50
    assert chart.rows[0][0] == "0"
    assert float(chart.rows[0][1].replace(",", "")) > 100 * float(chart.rows[4][1])


def test_of_many_layers_some_are_drawn_and_all_are_in_the_table():
    chart = charts.places(some_layers(70))
    drawn = [text for text in texts(chart) if text.startswith("layer ")]
    assert len(drawn) == 6
    assert {"layer 0", "layer 207"} <= set(drawn)
    assert {len(row) for row in chart.rows} == {1 + 70}


def test_the_bars_of_lengths_are_as_high_as_their_rows_are_many():
    chart = charts.lengths(a_tally([480] + [15] * 10 + [5] * 30))
    heights = [float(bar["height"]) for bar in marks(chart, "bar")]
    assert heights[0] == pytest.approx(3 * heights[1], rel=0.01)
    assert [row[1] for row in chart.rows] == ["5", "5", "5", "15", "480"]


@pytest.mark.parametrize("longest", [1, 2, 47, 48, 49, 1000, 4096, 131_072, 10**6])
def test_lengths_take_a_few_dozen_bars_whatever_the_longest(longest):
    chart = charts.lengths(a_tally([*range(1, min(longest, 5000) + 1), longest]))
    bars = marks(chart, "bar")
    assert len(bars) <= 48
    assert longest <= 48 or max(float(bar["x"]) + float(bar["width"]) for bar in bars) > 350


def test_the_table_of_shares_has_rows_and_percent():
    tally = a_tally([5, 5, 5])
    tally.shares[:] = 0
    tally.shares[[0, 19]] = 1, 2
    chart = charts.shares(tally)
    assert chart.rows == [("0 to 5 %", "1", "33.3 %"), ("95 to 100 %", "2", "66.7 %")]


def test_a_right_row_lies_on_the_diagonal_and_inside_the_band():
    shown = charts.readings(a_tally([1], a=right(1), b=right(7, 0.01), c=right(9, -0.02)))
    assert [dot["class"] for dot in marks(charts.agreement(shown), "point")] == ["point s0"] * 3
    (band,) = marks(charts.residuals(shown), "band")
    top, bottom = float(band["y"]), float(band["y"]) + float(band["height"])
    dots = marks(charts.residuals(shown), "point")
    assert len(dots) == 3
    assert all(top < float(dot["cy"]) < bottom for dot in dots)
    middle, sigma = (top + bottom) / 2, (bottom - top) / 2 / MOST_SIGMAS
    assert sorted(round((middle - float(dot["cy"])) / sigma) for dot in dots) == [-2, 0, 1]


def test_a_row_that_is_wrong_is_red_named_and_counted():
    shown = charts.readings(a_tally([1], a=right(1), b=BAD))
    chart = charts.agreement(shown)
    assert [dot["class"] for dot in marks(chart, "point")] == ["point s0", "point bad"]
    assert chart.rows[0] == ("row 9 (abc)", "-0.5", "-3", "-2.5", "no")
    off = charts.residuals(shown)
    assert [title.text for title in svg(off).iter("title")] == ["row 9 (abc): -250 sigmas"]
    assert off.rows[0] == ("below 1", "1")
    assert off.rows[-1] == (f"above {MOST_SIGMAS:.1f}", "1")


def test_the_canary_has_both_distances_of_every_layer():
    chart = charts.canary(canary((2, 0.999, 0.01), (8, 0.7, 0.9)))
    assert chart.rows == [("2", "0.999000", "0.01", "2"), ("8", "0.700000", "0.9", "8")]
    hints = [title.text for title in svg(chart).iter("title")]
    assert hints == ["layer 2: 0.001", "layer 8: 0.3", "layer 2: 0.01", "layer 8: 0.9"]
