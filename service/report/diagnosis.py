"""Renders the page of `quarry diagnose --report`: verdict, acceptance, what was tried, the worst rows."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from schemas.dataset.seal import seal_bytes
from service.diagnose.acceptance import Length
from service.diagnose.diagnosis import Diagnosis
from service.diagnose.verdict import (
    LENGTHS,
    TRIED,
    facts,
    findings,
    length_rows,
    not_tried,
    tried_rows,
    verdict,
)
from service.export.source import Source
from service.report.chart import TOP, WIDTH, Axis, Chart
from service.report.sample_text import load_tokenizer, sample_tokens
from service.report.templates import templates
from service.report.wording import percent


def write_page(path: Path, diagnosis: Diagnosis, source: Source, target: Path) -> None:
    """Write the page to `path` atomically. Raises OSError.

    `target` is the folder with the target's tokenizer; without one, only ids are shown.
    """
    loaded = load_tokenizer(target)
    tokenizer = None if isinstance(loaded, str) else loaded
    page = templates().get_template("diagnosis.html")
    text = page.render(
        diagnosis=diagnosis,
        found=findings(diagnosis),
        verdict=verdict(diagnosis),
        facts=facts(diagnosis),
        not_tried=not_tried(diagnosis),
        steps=steps(diagnosis),
        charts={title: lengths(group) for title, group in diagnosis.groups.items()},
        tried=(TRIED, tried_rows(diagnosis.search.tried)),
        learnt=(TRIED, tried_rows(diagnosis.search.learnt)),
        lengths_head=LENGTHS,
        worst=[(one, sample_tokens(source.rows.row(one.number), tokenizer)) for one in diagnosis.worst],
        has_text=tokenizer is not None,
        made_at=datetime.now(UTC),
    )
    seal_bytes(path, text.encode())


def steps(diagnosis: Diagnosis) -> Chart:
    """Return a chart of the share of drafts accepted by step."""
    shares = dict(enumerate(diagnosis.by_step, 1))
    chart = Chart(240, Axis(0.5, len(shares) + 0.5, 44, WIDTH - 12, whole=True), Axis(0, 1, 206, TOP))
    chart.line(shares, "s0", "step")
    chart.rows = [(str(step), percent(share)) for step, share in shares.items()]
    return chart


def lengths(group: Mapping[str, Length]) -> Chart:
    """Return a chart of the length and its interval for each name of a group."""
    names = tuple(name[:12] for name in group)
    x = Axis(-0.5, len(names) - 0.5, 44, WIDTH - 12, names=names)
    chart = Chart(240, x, Axis(1, max(1.1, *(one.high for one in group.values())), 206, TOP))
    for place, one in enumerate(group.values()):
        at, mean = chart.x.at(place), chart.y.at(one.mean)
        chart.mark("line", "spread", x1=at, x2=at, y1=chart.y.at(one.low), y2=chart.y.at(one.high))
        chart.mark("circle", "dot s0", hint=f"{names[place]}: {one.mean:.3f}", cx=at, cy=mean, r=3)
    chart.rows = length_rows(group)
    return chart
