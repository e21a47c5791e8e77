"""Selects the jobs of a dataset to read: all complete ones, named ones, or those captured since a time."""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, time

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from schemas.dataset.jobs_table import MAX_TABLE_BYTES, JobEntry, JobsTable
from schemas.dataset.manifest import Manifest, read_manifest
from schemas.names import FINAL_NORM_PATH, JOBS_PATH, MANIFEST_FOLDER, is_job_id, manifest_path
from service.artifacts.dataset_files import MANIFEST_BYTES, Files, HubFiles, read_file
from service.reader.errors import ReaderError

_SHOWN_JOBS = 5
"""How many jobs an error names; a repository that gets a job every night holds hundreds."""
_DAY_OR_TIME: TypeAdapter[datetime | date] = TypeAdapter(AwareDatetime | date)


def read_jobs(
    files: Files, jobs: frozenset[str] | None, since: str | date | None = None
) -> dict[str, Manifest]:
    """Return the manifests by id of all complete jobs, or of those named, captured at `since` or later.

    A job is complete when its manifest exists, which is written last. A file that no manifest names is not
    part of the dataset, wherever it is. Raises ReaderError.
    """
    found = {path.rpartition("/")[2].removesuffix(".json") for path in files.manifests()}
    complete = frozenset(filter(is_job_id, found))
    wanted = complete if jobs is None else jobs
    missing = sorted(wanted - complete)
    if missing or not wanted:
        what = f"not complete: {_named(missing)}" if missing else "no job is complete"
        raise ReaderError(
            f"{what}. There is no {MANIFEST_FOLDER}/{missing[0] if missing else '<job>'}.json, which comes "
            "last. Is this the root of a dataset that Quarry made? Wait for the job or its push, resume it "
            f"if it broke off, or, in a copy, copy {MANIFEST_FOLDER}/ as well. "
            f"Complete here: {_named(sorted(complete)) or 'none'}"
        )
    if since is None:
        return {job: _manifest(files, job) for job in sorted(wanted)}
    late = _captured_since(files, sorted(wanted), since)
    return {job: one if isinstance(one, Manifest) else _manifest(files, job) for job, one in late.items()}


def check_norm(files: Files, manifests: Mapping[str, Manifest]) -> None:
    """Check the dataset's one final norm against each job's manifest. Raises ReaderError."""
    sha256 = hashlib.sha256(read_file(files, FINAL_NORM_PATH)).hexdigest()
    for job, manifest in manifests.items():
        if sha256 not in {entry.sha256 for entry in manifest.extras if entry.path == FINAL_NORM_PATH}:
            raise ReaderError(
                f"{FINAL_NORM_PATH} is not that of job {job}, so that its last layer would be normed as "
                "another model's: a folder holds jobs of one model; copy the job's own beside it"
            )


def _captured_since(files: Files, jobs: Iterable[str], since: str | date) -> dict[str, Manifest | JobEntry]:
    """Return when those of `jobs` were captured that are not older than `since`. Raises if there are none."""
    begin = _moment(since)
    told = _told(files, jobs)
    late = {job: one for job, one in told.items() if one.captured_at >= begin}
    if not late:
        newest = f"the newest is of {max(one.captured_at for one in told.values()):%Y-%m-%d %H:%M} UTC"
        raise ReaderError(f"no job was captured since {begin:%Y-%m-%d %H:%M} UTC: {newest}")
    return late


def _moment(since: str | date) -> datetime:
    try:
        given = _DAY_OR_TIME.validate_python(since)
    except ValidationError as error:
        raise ReaderError(
            f"since={since!r} is neither a day, such as 2026-11-01, nor a time with its offset from UTC, "
            "such as 2026-11-01T03:00+01:00"
        ) from error
    if isinstance(given, datetime):
        return given.astimezone(UTC)
    return datetime.combine(given, time(), UTC)


def _told(files: Files, jobs: Iterable[str]) -> dict[str, Manifest | JobEntry]:
    """Return, for each job, the manifest or table row that says when it was captured.

    In a repository each manifest costs a request. There the table of jobs is used, but only its rows made
    from the manifests as they are now.
    """
    rows: dict[str, JobEntry] = {}
    if isinstance(files, HubFiles) and files.has(JOBS_PATH):
        with suppress(ReaderError, ValidationError):  # it may be another's
            table = JobsTable.model_validate_json(read_file(files, JOBS_PATH, MAX_TABLE_BYTES))
            rows = table.counting(files.names(MANIFEST_FOLDER))
    return {job: rows.get(manifest_path(job)) or _manifest(files, job) for job in jobs}


def _manifest(files: Files, job: str) -> Manifest:
    path = manifest_path(job)
    manifest, contradictions = read_manifest(read_file(files, path, MANIFEST_BYTES), path)
    if manifest.provenance.job_id != job:
        raise ReaderError(f"{path} is the manifest of {manifest.provenance.job_id}")
    if contradictions:
        raise ReaderError(f"{path} was changed after it was made: its {contradictions[0]}")
    return manifest


def _named(jobs: list[str]) -> str:
    more = len(jobs) - _SHOWN_JOBS
    return ", ".join(jobs[:_SHOWN_JOBS]) + (f" and {more} more" if more > 0 else "")
