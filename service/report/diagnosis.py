"""Makes the page of `quarry diagnose --report`: verdict, acceptance, what was tried, the worst rows."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from service.diagnose.acceptance import Length
from service.diagnose.diagnosis import Diagnosis, Ground
from service.diagnose.verdict import capture_command, facts, findings, groups, verdict
from service.report.chart import TOP, WIDTH, Axis, Chart
from service.report.page import seal_page, templates
from service.report.sample_text import load_tokenizer, sample_tokens
from service.report.wording import count, percent


def write_page(path: Path, diagnosis: Diagnosis, ground: Ground) -> None:
    """Write the page to `path`, which appears whole or not at all. Raises WriteFailed."""
    loaded = load_tokenizer(ground.weights.folder)
    tokenizer = None if isinstance(loaded, str) else loaded
    rows = ground.source.rows
    tried = [
        (one.name, f"{one.length:.3f}", f"{one.gain:+.3f}", f"{one.low:+.3f}..{one.high:+.3f}", one.effect)
        for one in (*diagnosis.tried, *diagnosis.learnt)
    ]
    text = (
        templates()
        .get_template("diagnosis.html")
        .render(
            diagnosis=diagnosis,
            found=findings(diagnosis),
            verdict=verdict(diagnosis),
            facts=facts(diagnosis),
            command=capture_command(diagnosis) if diagnosis.missing_layers else "",
            steps=steps(diagnosis),
            charts=[(title, lengths(group)) for title, group in groups(diagnosis) if group],
            tried=tried,
            worst=[(one, sample_tokens(rows.row(one.number), tokenizer)) for one in diagnosis.worst],
            has_text=tokenizer is not None,
            made_at=datetime.now(UTC),
        )
    )
    seal_page(path, text)


def steps(diagnosis: Diagnosis) -> Chart:
    """Return the share of drafts accepted by step."""
    shares = dict(enumerate(diagnosis.by_step, 1))
    chart = Chart(240, Axis(0.5, len(shares) + 0.5, 44, WIDTH - 12, whole=True), Axis(0, 1, 206, TOP))
    chart.line(shares, "s0", "step")
    chart.rows = [(str(step), percent(share)) for step, share in shares.items()]
    return chart


def lengths(group: Mapping[str, Length]) -> Chart:
    """Return a length and its interval for each name of a group."""
    names = tuple(name.strip()[:12] for name in group)
    high = max(one.high for one in group.values())
    chart = Chart(
        240, Axis(-0.5, len(names) - 0.5, 44, WIDTH - 12, names=names), Axis(1, max(high, 1.1), 206, TOP)
    )
    for place, one in enumerate(group.values()):
        at = chart.x.at(place)
        chart.mark("line", "spread", x1=at, x2=at, y1=chart.y.at(one.low), y2=chart.y.at(one.high))
        chart.mark(
            "circle", "dot s0", hint=f"{names[place]}: {one.mean:.3f}", cx=at, cy=chart.y.at(one.mean), r=3
        )
    chart.rows = [
        (name.strip(), f"{one.mean:.3f}", f"{one.low:.3f}..{one.high:.3f}", count(one.drafts))
        for name, one in group.items()
    ]
    return chart
