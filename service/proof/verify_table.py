"""`jobs.json` of a dataset, held against the manifests that are there."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from pydantic import ValidationError

from schemas.base import first_fault
from schemas.dataset.jobs_table import MAX_TABLE_BYTES, JobEntry, JobsTable
from schemas.names import JOBS_PATH
from service.artifacts.dataset_files import Files, HubFiles, read_file
from service.proof.strays import job_of


def table_faults(files: Files, told: Mapping[str, JobEntry], begun_at: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the table, if there is one; `told` is what it should say of each manifest.

    `begun_at` are the files that were there before the manifests were read, without those that could not be
    read here: more may have come meanwhile.
    What is wrong with the table ends the next push, or gives a wrong card; a manifest that it lists beside
    the job's files was lost. Raises as `read_file` does.
    """
    if JOBS_PATH not in begun_at:
        return
    try:
        table = JobsTable.model_validate_json(read_file(files, JOBS_PATH, MAX_TABLE_BYTES))
    except ValidationError as error:
        yield f"is not a table of this version: {first_fault(error)}"
        return
    paths = set(files.paths())  # after the table: the manifests that it lists were stored before it
    rows = table.counting({path: row.manifest.sha256 for path, row in told.items()})
    stale = {row.manifest.path for row in table.jobs if rows.get(row.manifest.path) != row}
    for path in sorted(stale.intersection(begun_at)):
        yield f"lists {path} as it is not there"
    gone = stale - paths.union(begun_at)
    # A folder may hold some of the jobs, or those of several folders: a push of it writes another table.
    if not isinstance(files, HubFiles):
        begun = set(map(job_of, paths))
        gone = {path for path in gone if PurePosixPath(path).stem in begun}
    yield from (f"lists {path}, which is not there" for path in sorted(gone))
    if isinstance(files, HubFiles):
        yield from (
            f"does not list {path} as it is there" for path in sorted(told.keys() - rows.keys() - stale)
        )
    # A push may have put a job into another configuration than its request names.
    names = [name for name in JobEntry.model_fields if name != "config_name"]
    for path, row in rows.items():
        # By what is written of them: one that is not a number differs from itself.
        right = told[path]
        wrong = [name for name in names if repr(getattr(row, name)) != repr(getattr(right, name))]
        if wrong:
            yield f"says other things of {path} than it does itself: {', '.join(wrong)}"
