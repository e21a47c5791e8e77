"""Renders a page from what `quarry verify` found and counted: one file without scripts, network or images.

Everything in a dataset is untrusted. The templates escape all text, and the page's content security policy
allows no scripts and no styles but the page's own.

Imports torch by way of the tally: import it lazily.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from schemas.job import RejectView
from service.plan.model_folder import TOKENIZER_FILES, files_digest
from service.proof.tally import DatasetTally, Finding
from service.proof.verify import VerifyReport
from service.report import charts
from service.report.sample_text import Decode, load_tokenizer, sample_tokens
from service.report.templates import templates
from service.report.wording import count, short

MAX_FINDINGS = 200
MAX_REASONS = 50
_MADE_CANARIES = ("passed", "cached")


def render_page(
    report: VerifyReport, tally: DatasetTally, model_folder: Path | None, made_at: datetime
) -> str:
    """Return the page as HTML.

    Args:
        report: what was found.
        tally: what was counted.
        model_folder: the target's folder, with the tokenizer that decodes the samples; without it, only ids
            are shown.
        made_at: the time to put on the page, in UTC.
    """
    loaded = load_tokenizer(model_folder) if model_folder is not None else "give --model FOLDER to see text"
    tokenizer = None if isinstance(loaded, str) else loaded
    not_checked = {
        "logits": not report.logit_rows,
        "canary": any(job.checks.canary not in _MADE_CANARIES for job, _ in tally),
    }
    environment = templates()
    environment.filters |= {"tokens": partial(sample_tokens, tokenizer=tokenizer), "by_reason": _by_reason}
    text: str = environment.get_template("page.html").render(
        report=report,
        tally=tally,
        made_at=made_at,
        findings=_by_file(report.findings[:MAX_FINDINGS]),
        findings_left=max(0, len(report.findings) - MAX_FINDINGS),
        passed="passed" if report.ok else "made",
        faulty_states=any(
            layer.faults(layer_id) for _, counted in tally for layer_id, layer in counted.layers.items()
        ),
        faulty_logits=any(counted.faulty_points.items() for _, counted in tally),
        not_checked=[name for name, missing in not_checked.items() if missing],
        num_files=sum(len(job.shards) + len(job.indexes) + len(job.extras) for job, _ in tally),
        made_canaries=_MADE_CANARIES,
        has_model=model_folder is not None,
        has_text=tokenizer is not None,
        text_note=_text_note(loaded, tally, model_folder),
        charts=charts,
    )
    return text


def _by_file(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Return the findings by file, in the order of each file's first finding."""
    by_file: dict[str, list[str]] = {}
    for finding in findings:
        by_file.setdefault(finding.path, []).append(finding.what)
    return by_file


def _by_reason(rejects: Sequence[RejectView]) -> list[tuple[str, str, str]]:
    """Return the most frequent reject reasons with counts and an example each."""
    reasons = Counter(reject.reason for reject in rejects)
    example = {reject.reason: reject.detail for reject in reversed(rejects)}
    most = reasons.most_common(MAX_REASONS)
    return [(short(reason), count(samples), short(example[reason])) for reason, samples in most]


def _text_note(loaded: tuple[Decode, int] | str, tally: DatasetTally, model_folder: Path | None) -> str:
    if isinstance(loaded, str) or model_folder is None:
        return f"Token ids, because no tokenizer was read: {loaded}" if isinstance(loaded, str) else ""
    planned = {job.provenance.identity.tokenizer_sha256 for job, _ in tally}
    if planned - {files_digest(model_folder, TOKENIZER_FILES)}:
        return "The tokenizer files of this folder are not those of the job: the text may differ."
    return ""
