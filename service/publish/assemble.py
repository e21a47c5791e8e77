"""Completes a finished job's dataset folder: adds counts, final norm, manifest and card to its files.

The manifest is written last, before only the card and the table of jobs, and only if every planned sample is
accounted for, so a folder with a manifest is complete. The same job gives the same bytes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from schemas.dataset.entries import FileEntry, ShardEntry
from schemas.dataset.errors import DatasetError
from schemas.dataset.jobs_table import JobEntry, table_of
from schemas.dataset.manifest import CanaryReport, CanaryState, CheckReport, Manifest, Totals, read_manifest
from schemas.dataset.seal import seal_bytes
from schemas.dataset.token_counts import read_counts, vocabulary_stats
from schemas.identity import Provenance
from schemas.job import Progress, RejectView
from schemas.names import (
    CARD_PATH,
    FINAL_NORM_PATH,
    JOBS_PATH,
    MANIFEST_FOLDER,
    job_folders,
    manifest_path,
    token_freq_path,
)
from schemas.request import ExtractRequest
from service.errors import DatasetBroken, SourceRefused
from service.publish.card import render_card
from service.publish.extras import write_final_norm, write_token_freq
from service.store import HOME, PublishLease, Store, UnitCommit, commits, jobs

PAGE_REJECTS = 1000


@dataclass(frozen=True, slots=True)
class Account:
    """The store's record of a job whose units are all done.

    `rejects` are those of the plan and the units; `token_counts` is how often each token is supervised.
    """

    job_id: str
    request: ExtractRequest
    provenance: Provenance
    progress: Progress
    commits: tuple[UnitCommit, ...]
    rejects: tuple[RejectView, ...]
    token_counts: Counter[int]
    captured_at: datetime
    attempt: str
    """Part of the names of temporary files: an owner that lost the lease may still be writing."""

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """The shards, in unit order."""
        return tuple(shard for commit in self.commits for shard in commit.shards)

    @property
    def indexes(self) -> tuple[FileEntry, ...]:
        """The index files, in unit order."""
        return tuple(commit.index for commit in self.commits if commit.index is not None)


def account_of(store: Store, lease: PublishLease, request: ExtractRequest) -> Account:
    """Read a job's account. Raises SourceRefused (`source`) if every sample was rejected."""
    made = tuple(store.read(commits.unit_commits, lease.job_id))
    if lease.provenance is None or not any(commit.shards for commit in made):
        raise SourceRefused(
            "every sample was rejected, so there is nothing to store",
            field="source",
            cure="read the reasons among the job's rejects, fix the source or the limits, start a new job",
        )
    return Account(
        job_id=lease.job_id,
        request=request,
        provenance=lease.provenance,
        progress=store.read(jobs.job, lease.job_id).progress,
        commits=made,
        rejects=tuple(_all_rejects(store, lease.job_id)),
        token_counts=_all_counts(store, lease.job_id),
        captured_at=lease.captured_at,
        attempt=str(lease.epoch),
    )


def assemble(
    dataset: Path,
    account: Account,
    final_norm: bytes,
    canary: CanaryState,
    report: CanaryReport | None,
) -> Manifest:
    """Write the extras, manifest and card of `account` into `dataset`, where its files have landed.

    Args:
        dataset: the dataset folder; it may hold other jobs, too.
        account: the job's account.
        final_norm: the content of `final_norm.safetensors`.
        canary: what the manifest says about the canary.
        report: the report of the canary that passed, if it was not skipped.

    Raises:
        DatasetBroken: a sample, a token or a file is missing, and no manifest is written; or the folder's
            card is not UTF-8.
        OptionRefused: the folder holds another model's states, or jobs that do not mix with this one.
        OSError: from the file system; also if `dataset` is missing, since it was deleted meanwhile.
    """
    _remove_leftovers(dataset, account.job_id)
    for commit in account.commits:
        if commit.shards and commit.index is None:
            raise DatasetBroken(f"unit {commit.attempt_id.unit} has shards and no index")
        is_kept = account.request.storage.stays and commit.host == HOME
        if account.request.storage.retention == "consumed":
            if commit.index is not None:  # a shard may be removed at any moment
                _check_file(dataset, commit.index)
            continue
        if is_kept or not commit.is_stored:
            for entry in commit.files:
                _check_file(dataset, entry)
    totals = _totals(account)
    counts = account.token_counts
    if counts.total() != totals.supervised_tokens:
        detail = f"the counts of tokens name {counts.total()}, the units {totals.supervised_tokens}"
        raise DatasetBroken(f"{detail} that are supervised")
    token_freq = write_token_freq(dataset, account.job_id, counts, account.attempt)
    manifest = Manifest(
        provenance=account.provenance,
        identity_sha256=account.provenance.identity.sha256(),
        request=account.request.published(),
        request_sha256=account.request.sha256(),
        shards=account.shards,
        indexes=account.indexes,
        extras=(write_final_norm(dataset, final_norm, account.attempt), token_freq),
        rejects=account.rejects,
        totals=totals,
        checks=_checks(account.commits, canary, report),
        vocabulary=vocabulary_stats(counts),
        captured_at=account.captured_at,
    )
    _remove_unnamed(dataset, manifest)
    content = manifest.model_dump_json(indent=1) + "\n"
    seal_bytes(dataset / manifest_path(account.job_id), content.encode(), account.attempt, dataset)
    _write_card(dataset, account.attempt)
    return manifest


def intact_manifest(path: Path) -> Manifest:
    """Return a manifest on disk. Raises DatasetBroken, also where it contradicts itself."""
    name = f"{MANIFEST_FOLDER}/{path.name}"
    try:
        manifest, contradictions = read_manifest(path.read_bytes(), name)
    except (FileNotFoundError, DatasetError) as error:
        raise DatasetBroken(str(error)) from error
    if contradictions:
        raise DatasetBroken(f"{name} was changed after it was made: its {contradictions[0]}")
    return manifest


def _remove_leftovers(dataset: Path, job_id: str) -> None:
    """Remove the temporary files of killed attempts at publishing the job."""
    for path in (manifest_path(job_id), token_freq_path(job_id), FINAL_NORM_PATH, JOBS_PATH, CARD_PATH):
        final = dataset / path
        for leftover in final.parent.glob(f".{final.name}.*tmp"):
            leftover.unlink(missing_ok=True)


def _remove_unnamed(dataset: Path, manifest: Manifest) -> None:
    """Remove Parquet files that match the card's globs for the job but do not belong to it."""
    named = {entry.path for entry in manifest.entries}
    for folder in job_folders(manifest.provenance.job_id):
        for path in (dataset / folder).glob("*.parquet"):
            if path.relative_to(dataset).as_posix() not in named:
                path.unlink(missing_ok=True)


def _write_card(dataset: Path, attempt: str) -> None:
    """Write the card and the table of all jobs that have a manifest."""
    card = dataset / CARD_PATH
    try:
        existing = card.read_text(encoding="utf-8") if card.exists() else None
    except UnicodeDecodeError as error:
        raise DatasetBroken(f"{CARD_PATH} is not UTF-8", cure=f"write {CARD_PATH} as UTF-8") from error
    jobs = [
        JobEntry.of(intact_manifest(path), path.read_bytes())
        for path in sorted((dataset / MANIFEST_FOLDER).glob("*.json"))
    ]
    text = render_card(jobs, existing=existing)
    for path, content in ((JOBS_PATH, table_of(jobs)), (CARD_PATH, text)):
        seal_bytes(dataset / path, content.encode(), attempt, dataset)


def _all_rejects(store: Store, job_id: str) -> Iterator[RejectView]:
    after = -1
    while page := store.read(commits.rejects, job_id, after=after, limit=PAGE_REJECTS):
        yield from page
        after = page[-1].position


def _all_counts(store: Store, job_id: str) -> Counter[int]:
    total, after = Counter[int](), -1
    while page := store.read(commits.token_counts, job_id, after=after):
        for unit, content in page.items():
            try:
                total.update(read_counts(content, f"what unit {unit} counts"))
            except DatasetError as error:
                raise DatasetBroken(str(error), cure="restore a backup of the database") from error
        after = max(page)
    return total


def _check_file(dataset: Path, entry: FileEntry) -> None:
    file = dataset / entry.path
    if not file.is_file():
        raise DatasetBroken(f"{entry.path} is missing")
    if file.stat().st_size != entry.bytes:
        raise DatasetBroken(f"{entry.path} has {file.stat().st_size} bytes, {entry.bytes} were committed")


def _totals(account: Account) -> Totals:
    written = sum(shard.rows for shard in account.shards)
    rejected = len(account.rejects)
    planned = account.progress.samples_planned
    if written + rejected != planned:
        raise DatasetBroken(f"{planned} samples were planned, {written} are written and {rejected} rejected")
    tokens = sum(shard.tokens for shard in account.shards)
    committed = sum(commit.num_tokens for commit in account.commits)
    if tokens != committed:
        raise DatasetBroken(f"the shards hold {tokens} tokens, the units {committed}")
    return Totals(
        samples_planned=planned,
        samples_written=written,
        samples_rejected=rejected,
        samples_known=account.progress.samples_known,
        samples_given_up=account.progress.samples_given_up,
        tokens=tokens,
        supervised_tokens=sum(commit.supervised_tokens for commit in account.commits),
        bytes=sum(shard.bytes for shard in account.shards),
    )


def _checks(commits: Sequence[UnitCommit], canary: CanaryState, report: CanaryReport | None) -> CheckReport:
    made = [commit.checks for commit in commits]
    return CheckReport(
        rows_checked=sum(checks.rows_checked for checks in made),
        logit_rows=sum(checks.logit_rows for checks in made),
        logit_argmax_agree=sum(checks.logit_argmax_agree for checks in made),
        logit_max_error=max((checks.logit_max_error for checks in made), default=0.0),
        answers=dict(sum((Counter(checks.answers) for checks in made), Counter())),
        second_runs=sum(checks.second_runs for checks in made),
        second_run_cosine=min(
            (checks.second_run_cosine for checks in made if checks.second_run_cosine is not None),
            default=None,
        ),
        canary=canary,
        canary_report=report,
    )
