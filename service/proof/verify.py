"""`quarry verify`: reads a finished dataset again, on disk or on the Hub, and reports everything wrong in it.

Imports torch: import it lazily. Nothing in the dataset is trusted, including paths.
"""

import errno
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, ValidationError, computed_field
from safetensors import safe_open

from schemas.base import Wire
from schemas.dataset.entries import FileEntry
from schemas.dataset.errors import DatasetError
from schemas.dataset.files import LocalFile
from schemas.dataset.jobs_table import JobEntry
from schemas.dataset.manifest import CheckReport, Manifest
from schemas.dataset.norm import read_norm_file
from schemas.dataset.seal import BLOCK_BYTES, sha256_of
from schemas.dataset.token_counts import differences, read_counts, vocabulary_stats
from schemas.identity import FinalNorm
from schemas.names import (
    FINAL_NORM_PATH,
    JOBS_PATH,
    PRIVATE_FOLDER,
    index_path,
    is_inside,
    is_job_id,
    is_manifest,
    manifest_path,
    token_freq_path,
)
from service.artifacts.dataset_files import Files, LocalFiles
from service.errors import EngineRefused, NotFound, OptionRefused
from service.plan.sources.rows import RejectReason
from service.proof.head import Head
from service.proof.manifests import read_manifests
from service.proof.strays import strays
from service.proof.tally import DatasetTally, Finding, JobTally, Printable
from service.proof.verify_table import table_faults
from service.proof.verify_unit import verify_unit
from service.visible import one_line

_SHOWN = 50
MISSING = "is missing"
NOTHING = "holds no manifest, and no job has a unit: nothing is stored here yet, or this is not a dataset"
SUMMED = ("rows", "tokens", "consumed_shards", "logit_rows", "logit_argmax_agree")
"""Counts of each job that the report sums."""
GOING_S = 5.0
"""How long the removal of a consumed unit's shards, one by one, may take."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a verifying process reports, and learns about, files that crash the process that reads them.

    `note` is called with each path before the file is read and for each of its blocks and rows, and with None
    before files are fetched. Files in `broken` are not read, for the reason given there.
    """

    note: Callable[[str | None], None] = lambda path: None
    broken: Mapping[str, str] = field(default_factory=dict)


UNWATCHED = Reading()


class VerifyReport(Wire):
    """What was read and what was found. `logit_max_error` is the largest |log-probability difference|.

    `proven` is what each job's manifest says of its capture: the canary cannot be repeated without an engine.
    `not_complete` are jobs that have files and no manifest: they are captured or pushed still, or given up.
    As a string it is the plain lines that the command prints, the verdict last.
    """

    where: Printable
    jobs: int
    shards: int
    rows: int
    tokens: int
    bytes: int
    consumed_shards: int = 0
    logit_rows: int
    logit_argmax_agree: int
    logit_max_error: float
    proven: dict[str, CheckReport] = Field(default_factory=dict)
    not_complete: tuple[str, ...] = Field(default=(), exclude_if=lambda jobs: not jobs)
    findings: tuple[Finding, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether a job is complete and nothing is wrong."""
        return self.verdict == "right"

    @property
    def verdict(self) -> Literal["right", "BROKEN", "not read whole", "not complete yet"]:
        """What the dataset is."""
        if self.findings:
            return "not read whole" if all(finding.unread for finding in self.findings) else "BROKEN"
        return "right" if self.jobs else "not complete yet"

    def __str__(self) -> str:
        lines = [
            f"{self.where}: {_many(self.jobs, 'job')}, {_many(self.shards, 'shard')}, {self.bytes:,} bytes",
            f"{_many(self.rows, 'row')} and {_many(self.tokens, 'token')} read again, every layer",
        ]
        if self.consumed_shards:
            lines.append(
                f"{_many(self.consumed_shards, 'shard')} consumed: gone since every consumer had them"
            )
        if self.logit_rows:
            agree = f"{self.logit_argmax_agree} of {self.logit_rows} rows agree on the next token"
            lines.append(f"logit check: {agree}, largest log-probability error {self.logit_max_error:.3g}")
        else:
            lines.append("logit check: not made (it needs --model, layer N, and the index's `top_logprobs`)")
        for job_id, checks in self.proven.items():
            lines += _canary_lines(job_id, checks)
        if self.not_complete:
            jobs = f"{_many(len(self.not_complete), 'job')} without a manifest, captured still or given up"
            lines.append(f"not complete: {jobs}: {', '.join(self.not_complete[:_SHOWN])}")
        lines += [f"error: {finding.path}: {finding.what}" for finding in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            lines.append(f"error: and {len(self.findings) - _SHOWN} more")
        errors = f": {_many(len(self.findings), 'error')}" if self.findings else ""
        lines.append(f"the dataset is {self.verdict}{errors}")
        return "\n".join(map(one_line, lines))


def _many(count: int, what: str) -> str:
    """Return `1 row`, or `1,000 rows`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def verify_dataset(
    dataset: Path | Files,
    *,
    model_folder: Path | None = None,
    tally: DatasetTally | None = None,
    reading: Reading = UNWATCHED,
) -> VerifyReport:
    """Read a whole dataset again: manifests, hashes, every layer of every row, indexes, totals.

    Args:
        dataset: a folder in the layout of a Hub repository, or such a repository, read unit by unit.
        model_folder: the target's config and safetensors; without it there is no logit check.
        tally: receives what a report of the dataset shows.
        reading: what another process knows of files that end the process.

    Raises:
        NotFound: there is no such folder.
        EngineRefused: the model folder holds no readable head, or another model's.
        OptionRefused: it is not a dataset, but has one below it.
        OptionRefused, HubUnavailable, DiskFull: the repository cannot be read.
    """
    if isinstance(dataset, Path) and not dataset.is_dir():
        raise NotFound(f"{dataset} is not a folder")
    files = LocalFiles(dataset) if isinstance(dataset, Path) else dataset
    findings: list[Finding] = []
    begun_at = files.paths()
    rows: dict[str, JobEntry] = {}
    jobs = list(read_manifests(files, findings, rows))
    unread = {finding.path for finding in findings if finding.unread}
    try:
        faults = table_faults(files, rows, set(begun_at) - unread)
        findings += [Finding(path=JOBS_PATH, what=what) for what in faults]
    except (OSError, DatasetError, EOFError, MemoryError) as error:
        findings.append(Finding.of(JOBS_PATH, error))
    sums = dict.fromkeys(SUMMED, 0)
    max_error = 0.0
    heads: dict[str, Head] = {}
    for job in jobs:
        head = None
        if model_folder is not None:
            dtype = job.provenance.identity.dtype
            if dtype not in heads:
                heads[dtype] = Head.load(model_folder, dtype)
            head = heads[dtype]
            _check_model(model_folder, head, job)
        counted = _verify_job(files, job, head, reading)
        findings += counted.findings
        sums = {name: number + getattr(counted, name) for name, number in sums.items()}
        max_error = max(max_error, counted.logit_max_error)
        if tally is not None:
            tally.append((job, counted))
    complete = {PurePosixPath(path).stem for path in begun_at if is_manifest(path)}
    named = {entry.path for job in jobs for entry in job.entries}
    unnamed, not_complete = strays(files.paths(), named, complete, unread)
    findings += unnamed
    is_begun = isinstance(dataset, Path) and (dataset / PRIVATE_FOLDER).is_dir()
    if not (jobs or complete or not_complete or is_begun):
        _refuse_parent(files.name, begun_at)
        findings.append(Finding(path="manifests/", what=NOTHING))
    return VerifyReport(
        where=files.name,
        jobs=len(jobs),
        shards=sum(len(job.shards) for job in jobs),
        bytes=sum(entry.bytes for job in jobs for entry in job.entries),
        **sums,
        logit_max_error=max_error,
        proven={job.provenance.job_id: job.checks for job in jobs},
        not_complete=not_complete,
        findings=tuple(dict.fromkeys(findings)),
    )


def _refuse_parent(where: str, paths: Iterable[str]) -> None:
    """Refuse what is not a dataset, but has datasets below it. Raises OptionRefused, which names one."""
    manifests = (path for path in map(PurePosixPath, paths) if is_manifest("/".join(path.parts[-2:])))
    below = sorted({str(path.parents[1]) for path in manifests if is_job_id(path.stem)})
    if below:
        others = f" and {_many(len(below) - 1, 'other')}" if below[1:] else ""
        detail = f"{where} is not a dataset, but has {below[0]}{others} below it"
        raise OptionRefused(detail, cure="name the folder of one dataset")


def _check_model(model_folder: Path, head: Head, job: Manifest) -> None:
    made, norm, hidden_size = job.provenance, head.final_norm, len(head.norm.weight_H)
    if (norm, hidden_size) != (made.final_norm, made.identity.hidden_size):
        raise EngineRefused(
            f"{model_folder} ends in {norm.kind} (eps {norm.eps}) over {hidden_size} elements, "
            f"the model of job {made.job_id} in {made.final_norm.kind} (eps {made.final_norm.eps}) over "
            f"{made.identity.hidden_size}",
            cure=f"give the folder of {made.identity.model} at revision {made.identity.revision}",
        )


def _canary_lines(job_id: str, checks: CheckReport) -> Iterator[str]:
    report = checks.canary_report
    if report is None:
        yield f"canary of {job_id}: {checks.canary}"
        return
    yield f"canary of {job_id}: {checks.canary}, against {report.reference}"
    for layer in report.layers:
        numbers = f"cosine {layer.cosine:.6f}, largest relative error {layer.max_rel_error:.2e}"
        yield f"  layer {layer.layer_id}: {numbers}, nearest to layer {layer.best_match_layer}"
    if report.noise is not None:
        yield f"  {report.noise}"
    if checks.second_runs:
        yield f"  second runs: {checks.second_runs}, cosine {checks.second_run_cosine:.6f}"


def _verify_job(files: Files, job: Manifest, head: Head | None, reading: Reading) -> JobTally:
    """Verify one job's files; return what was counted and found."""
    tally = JobTally()
    entries = job.entries
    rest = {entry.path: entry for entry in entries}
    if len(rest) < len(entries):
        return tally  # a broken manifest: do not read a shard as often as it is named
    outside = not all(map(is_inside, rest))
    units: dict[int, set[str]] = {}
    for entry in () if outside else job.shards:
        units.setdefault(entry.unit, {index_path(job.provenance.job_id, entry.unit)}).add(entry.path)
    there = set(files.paths()) if (is_consumed := job.is_consumed) else set()
    for unit, paths in sorted(units.items()):
        reading.note(None)
        shards = [path for path in paths if path != index_path(job.provenance.job_id, unit)]
        if is_consumed and there.isdisjoint(shards):
            tally.consumed_shards += sum(rest.pop(path, None) is not None for path in shards)
            continue
        found, of_unit = len(tally.findings), [rest.pop(path) for path in sorted(paths & rest.keys())]
        with files.held(paths) as folder:
            if not _faults(of_unit, folder, tally, reading):
                verify_unit(folder, job, unit, head, tally, reading.note)
            if is_consumed and len(tally.findings) > found and _went(folder, shards):
                del tally.findings[found:]
                tally.consumed_shards += len(shards)
    manifest = manifest_path(job.provenance.job_id)
    # If the turns of a conversation are rows, each turn may be rejected.
    rejected = Counter(
        f"{reject.position}{f', turn {reject.turn},' if reject.turn else ''}" for reject in job.rejects
    )
    for what, counts in (("sample {} is written", tally.sample_ids), ("position {} is rejected", rejected)):
        for name, count in counts.items():
            if count > 1:
                tally.fault(manifest, f"{what.format(name)} {count} times")
    for reject in job.rejects:
        # A duplicate has the id of the sample that came before it.
        if reject.sample_id in tally.sample_ids and reject.reason != RejectReason.DUPLICATE:
            tally.fault(manifest, f"sample {reject.sample_id} is written and rejected: {reject.reason}")
    # There are as many as rows, and a report over many jobs keeps every tally.
    tally.sample_ids.clear()
    extras = [path for path in rest if is_inside(path)]
    reading.note(None)
    with files.held(extras) as folder:
        if not _faults(rest.values(), folder, tally, reading):
            reading.note(FINAL_NORM_PATH)
            for what in _norm_faults(folder, job, head):
                tally.fault(FINAL_NORM_PATH, what)
        if tally.consumed_shards:
            return tally  # the sums over their rows are no longer known
        if not tally.findings and tally.supervised_tokens != job.totals.supervised_tokens:
            stated, counted = job.totals.supervised_tokens, tally.supervised_tokens
            tally.fault(manifest, f"totals.supervised_tokens is {stated}, expected {counted}")
        reading.note(token_freq_path(job.provenance.job_id))
        _compare_token_counts(folder, job, tally)
    return tally


def _norm_faults(folder: Path, job: Manifest, head: Head | None) -> Iterator[str]:
    made = job.provenance
    try:
        file = LocalFile(folder / FINAL_NORM_PATH)
        norm = read_norm_file(file, made.final_norm, made.identity.hidden_size)
        with safe_open(folder / FINAL_NORM_PATH, "pt") as opened:
            stated = (opened.metadata() or {}).get("final_norm")
    except (DatasetError, OSError) as error:
        yield f"cannot be read: {error}"
        return
    # Whoever makes the post-norm state without us takes the kind and eps from here.
    try:
        is_right = FinalNorm.model_validate_json(stated or "") == made.final_norm
    except ValidationError:
        is_right = False
    if not is_right:
        yield f"its metadata says {stated}, expected {made.final_norm.model_dump_json()}"
    if head is not None and not norm.is_that_of(head.norm, head.dtype):
        yield "it is not the model's"


def _went(folder: Path, shards: Collection[str]) -> bool:
    """Return whether a unit's shards, some of which were missing, were just being removed."""
    until_s = time.monotonic() + GOING_S
    while left := sum((folder / path).exists() for path in shards):
        if left == len(shards) or time.monotonic() > until_s:
            return False
        time.sleep(GOING_S / 100)
    return True


def _faults(entries: Collection[FileEntry], folder: Path, tally: JobTally, reading: Reading) -> bool:
    """Check files against their manifest entries; return whether any is wrong."""
    found = len(tally.findings)
    for entry in entries:
        try:
            for what in _file_faults(folder, entry, reading):
                tally.fault(entry.path, what)
        except FileNotFoundError:  # just consumed
            tally.fault(entry.path, MISSING)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                tally.fault(entry.path, MISSING)  # no file can have such a name
            else:
                tally.fault(entry.path, f"cannot be read: {error.strerror}", unread=True)
    return len(tally.findings) > found


def _compare_token_counts(folder: Path, job: Manifest, tally: JobTally) -> None:
    """Check a job's token counts, and the manifest's statistics of them, against its rows.

    Checks nothing unless the job's shards and indexes are intact: rows of other units were not read.
    """
    broken = {finding.path for finding in tally.findings}
    if broken & {entry.path for entry in (*job.shards, *job.indexes)}:
        return
    counted, path = tally.supervised.counts(), token_freq_path(job.provenance.job_id)
    if path not in broken and path in {entry.path for entry in job.extras}:
        try:
            for what in differences(read_counts((folder / path).read_bytes(), path), counted):
                tally.fault(path, what)
        except (DatasetError, MemoryError) as error:
            tally.fault(path, str(error) or "takes too much memory")
    stats = vocabulary_stats(counted, (part.draft_vocab for part in job.vocabulary.coverage))
    if job.vocabulary != stats:
        what = f"vocabulary is {job.vocabulary!r}, expected {stats!r}"
        tally.fault(manifest_path(job.provenance.job_id), what)


def _file_faults(folder: Path, entry: FileEntry, reading: Reading) -> Iterator[str]:
    if not is_inside(entry.path):
        yield "a path that leaves the dataset"
        return
    if entry.path in reading.broken:
        yield reading.broken[entry.path]
        return
    reading.note(entry.path)
    file = folder / entry.path
    if not file.is_file():
        yield MISSING
        return
    stat = file.stat()
    # Based on allocated blocks: holes in a sparse file cost no time and need no notes.
    notes = map(reading.note, repeat(entry.path, stat.st_blocks * 512 // BLOCK_BYTES))
    if stat.st_size != entry.bytes:
        yield f"has {stat.st_size} bytes, the manifest says {entry.bytes}"
    elif (digest := sha256_of(file, partial(next, notes, None))[0]) != entry.sha256:
        yield f"has sha256 {digest}, the manifest says {entry.sha256}"
