"""Makes the page from what `quarry verify` found and counted. One file: no script, no network, no image.

Everything in a dataset is untrusted. The template escapes all text, charts are made of elements, and the
page's own policy lets the browser run no script and take no style but the page's.

Imports torch by way of the tally: import it lazily.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from schemas.dataset.seal import sealing
from service.errors import WriteFailed
from service.plan.model_folder import TOKENIZER_FILES, files_digest
from service.proof.tally import DatasetTally
from service.proof.verify import Finding, VerifyReport
from service.report import charts
from service.report.job_view import MAX_NARROW, JobView, job_view
from service.report.sample_text import Decode, load_tokenizer
from service.report.wording import count, number, percent, short, size

MAX_FINDINGS = 200
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of check: passed, made on a dataset that is broken somewhere, failed, or not made at all."""

    name: str
    said: str
    state: Literal["passed", "made", "failed", "open"]


@dataclass(frozen=True, slots=True)
class Page:
    """What the template shows."""

    ok: bool
    where: str
    made_at: datetime
    version: str
    verdict: str
    summary: str
    findings: tuple[tuple[str, tuple[str, ...]], ...]
    findings_left: int
    tiles: tuple[tuple[str, str, str], ...]
    checks: tuple[Check, ...]
    text_note: str
    has_text: bool
    jobs: tuple[JobView, ...]


def write_page(
    path: Path, report: VerifyReport, tally: DatasetTally, model_folder: Path | None, made_at: datetime
) -> None:
    """Write the page to `path`, which appears whole or not at all. Raises WriteFailed.

    Args:
        path: the HTML file to make or replace.
        report: what was found.
        tally: what was counted while it was found.
        model_folder: the target's, whose tokenizer makes text of the samples; ids are shown without it.
        made_at: the time to put on the page, in UTC.
    """
    text = render_page(report, tally, model_folder, made_at)
    try:
        with sealing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteFailed(f"the page {path} cannot be written: {error}", field="report") from error


def render_page(
    report: VerifyReport, tally: DatasetTally, model_folder: Path | None, made_at: datetime
) -> str:
    """Return the page as HTML; arguments as of `write_page`."""
    loaded = load_tokenizer(model_folder) if model_folder is not None else "give --model FOLDER to see text"
    tokenizer = None if isinstance(loaded, str) else loaded
    checks = tuple(_checks(report, tally, model_folder is not None))
    page = Page(
        ok=report.ok,
        where=short(report.where),
        made_at=made_at,
        version=version("eagle-quarry"),
        verdict="The dataset is right" if report.ok else "The dataset is BROKEN",
        summary=_summary(report, checks),
        findings=tuple(_by_file(report.findings[:MAX_FINDINGS])),
        findings_left=max(0, len(report.findings) - MAX_FINDINGS),
        tiles=tuple(_tiles(report, tally)),
        checks=checks,
        text_note=_text_note(loaded, tally, model_folder),
        has_text=tokenizer is not None,
        jobs=tuple(job_view(job, counted, tokenizer) for job, counted in tally.jobs),
    )
    css = (_HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    text: str = (
        templates()
        .get_template("page.html")
        .render(page=page, css=css, css_hash=f"sha256-{digest}", max_narrow=MAX_NARROW, charts=charts)
    )
    return text


def templates() -> Environment:
    """Return the page's templates. They escape all that they show."""
    loader = FileSystemLoader(_HERE)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": count, "percent": percent, "short": short, "px": "{:.1f}".format}
    return environment


def _summary(report: VerifyReport, checks: Sequence[Check]) -> str:
    errors = len(report.findings)
    found = f"{count(errors)} error{'s' if errors > 1 else ''} found" if errors else "Nothing wrong was found"
    read = f"{count(report.rows)} rows of {count(report.tokens)} tokens were read again, every layer"
    left = ", ".join(dict.fromkeys(check.name.lower() for check in checks if check.state == "open"))
    return f"{found}. {read}.{f' Not checked: {left}.' if left else ''}"


def _by_file(findings: Sequence[Finding]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is wrong by the file that it is wrong in, in the order of the first error of each."""
    for path in dict.fromkeys(finding.path for finding in findings):
        yield path, tuple(finding.what for finding in findings if finding.path == path)


def _tiles(report: VerifyReport, tally: DatasetTally) -> Iterator[tuple[str, str, str]]:
    rejected = sum(len(job.rejects) for job, _ in tally.jobs)
    written = sum(job.totals.samples_written for job, _ in tally.jobs)
    supervised = sum(counted.supervised_tokens for _, counted in tally.jobs)
    layers = {len(job.provenance.layers) for job, _ in tally.jobs}
    lost = f" of {count(written)}" if report.rows != written else ""
    yield "samples", count(report.rows) + lost, f"{count(rejected)} rejected, with a reason"
    yield (
        "tokens",
        count(report.tokens),
        f"{percent(supervised / report.tokens)} supervised" if report.tokens else "-",
    )
    yield "layers", " / ".join(map(str, sorted(layers))) or "-", "captured of every token"
    yield "size", size(report.bytes), f"{count(report.bytes)} bytes"
    yield "shards", count(report.shards), f"of {count(report.jobs)} job{'s' if report.jobs != 1 else ''}"


def _checks(report: VerifyReport, tally: DatasetTally, has_model: bool) -> Iterator[Check]:
    made: Literal["passed", "made"] = "passed" if report.ok else "made"
    files = sum(len(job.shards) + len(job.indexes) + len(job.extras) for job, _ in tally.jobs)
    yield Check(
        "Files",
        f"length and sha256 of {count(files)} files against the manifests; no file unaccounted for",
        made,
    )
    what = "its checksum, finite, not all zero, not constant, unlike the row's other layers"
    wrong = any(
        layer.faults(layer_id) for _, counted in tally.jobs for layer_id, layer in counted.layers.items()
    )
    yield Check("States", f"every layer of {count(report.rows)} rows: {what}", "failed" if wrong else made)
    yield Check("Rows", "indexes, totals, identity and rejects against the rows; every sample once", made)
    if report.logit_rows:
        agree = (
            f"{count(report.logit_argmax_agree)} of {count(report.logit_rows)} rows agree on the next token"
        )
        error = f"the largest log-probability error is {number(report.logit_max_error)}"
        faults = any(counted.faulty_points.items() for _, counted in tally.jobs)
        yield Check("Logits", f"{agree}; {error}", "failed" if faults else made)
    else:
        why = (
            "no row has layer N and a witness" if has_model else "it needs the model's folder: --model FOLDER"
        )
        yield Check("Logits", f"not recomputed: {why}", "open")
    canaries = Counter(job.checks.canary for job, _ in tally.jobs)
    for canary, jobs in canaries.items():
        lowest = [job.checks.canary_min_cosine for job, _ in tally.jobs if job.checks.canary == canary]
        known = [cosine for cosine in lowest if cosine is not None]
        cosine = f", lowest cosine {min(known):.6f}" if known else ""
        said = f"{short(canary)} at the capture of {count(jobs)} job{'s' if jobs > 1 else ''}{cosine}"
        yield Check("Canary", said, made if canary in {"passed", "cached"} else "open")


def _text_note(loaded: tuple[Decode, int] | str, tally: DatasetTally, model_folder: Path | None) -> str:
    if isinstance(loaded, str) or model_folder is None:
        return f"Token ids, because no tokenizer was read: {loaded}" if isinstance(loaded, str) else ""
    planned = {job.provenance.identity.tokenizer_sha256 for job, _ in tally.jobs}
    if planned - {files_digest(model_folder, TOKENIZER_FILES)}:
        return "The tokenizer files of this folder are not those of the job: the text may differ."
    return ""
