"""Which jobs of a dataset are read: the complete ones, or those named, or those captured since a time."""

import warnings
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, date, datetime, time

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from schemas.dataset.jobs_table import JobsTable
from schemas.dataset.manifest import read_manifest
from schemas.names import JOBS_PATH
from service.reader.errors import ReaderError
from service.reader.files import Files, read_file

INDEX_FOLDER = "index"
MANIFEST_FOLDER = "manifests"
_SHOWN_JOBS = 5
"""Named in an error; a repository that gets a job every night holds hundreds."""
_DAY_OR_TIME: TypeAdapter[datetime | date] = TypeAdapter(AwareDatetime | date)


def index_paths(files: Files, jobs: frozenset[str] | None, since: str | date | None = None) -> list[str]:
    """Return the index files of all complete jobs, or of those named, sorted; of these the ones since then.

    A job is complete when its manifest is there, which comes last: a push of many shards shows indexes in
    commits before that, and leaves them if it breaks off. Raises ReaderError.
    """
    # Manifests first: a job that has one has all its indexes by now.
    manifests = frozenset(files.find(MANIFEST_FOLDER, ".json"))
    paths = files.find(INDEX_FOLDER, ".parquet")
    begun = frozenset(map(_job_of, paths))
    wanted = begun if jobs is None else jobs
    complete = {job for job in begun | wanted if _manifest_path(job) in manifests}
    missing = sorted(wanted - complete)
    if missing and (jobs is not None or not complete):
        raise ReaderError(
            f"not complete: {_named(missing)}. There is no {_manifest_path(missing[0])}, which "
            "comes last. Wait for the job or its push, resume it if it broke off, or, in a copy, "
            f"copy {MANIFEST_FOLDER}/ as well. Complete here: {_named(sorted(complete)) or 'none'}"
        )
    read = wanted & complete
    chosen = [path for path in paths if _job_of(path) in read]
    if not chosen:
        whose = f"of the jobs {sorted(jobs)}" if jobs is not None else "files"
        raise ReaderError(f"there are no index {whose}: is this the root of a dataset that Quarry made?")
    if since is None:
        return chosen
    late = _captured_since(files, read, since)
    return [path for path in chosen if _job_of(path) in late]


def _captured_since(files: Files, jobs: Iterable[str], since: str | date) -> set[str]:
    """Return those of `jobs` that were captured then or later; jobs without a time are warned of."""
    begin = _moment(since)
    times = _captured_at(files, jobs)
    without = sorted(job for job, captured_at in times.items() if captured_at is None)
    if without:
        what = f"since={since!r} leaves out jobs that do not say when they were captured: {_named(without)}"
        warnings.warn(f"{what}; name such jobs in 'jobs' to read them", stacklevel=4)
    known = {job: captured_at for job, captured_at in times.items() if captured_at is not None}
    late = {job for job, captured_at in known.items() if captured_at >= begin}
    if not late:
        newest = f"the newest is of {max(known.values()):%Y-%m-%d %H:%M} UTC" if known else "none says when"
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


def _captured_at(files: Files, jobs: Iterable[str]) -> dict[str, datetime | None]:
    """Return when each job was captured, from the table of jobs; from its manifest if the table lacks it."""
    table: dict[str, datetime | None] = {}
    with suppress(ReaderError, ValidationError):  # no table, or a newer version's
        rows = JobsTable.model_validate_json(read_file(files, JOBS_PATH)).jobs
        table = {row.job_id: row.captured_at for row in rows}
    for job in set(jobs) - table.keys():
        path = _manifest_path(job)
        table[job] = read_manifest(read_file(files, path), path)[0].captured_at
    return {job: table[job] for job in jobs}


def _manifest_path(job: str) -> str:
    return f"{MANIFEST_FOLDER}/{job}.json"


def _job_of(path: str) -> str:
    return path.split("/")[1]


def _named(jobs: list[str]) -> str:
    more = len(jobs) - _SHOWN_JOBS
    return ", ".join(jobs[:_SHOWN_JOBS]) + (f" and {more} more" if more > 0 else "")
