"""Reads untrusted content of a repository: its card, its table of jobs, a manifest.

Runs in a process of its own, which imports this module but not the Hub's client.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from schemas.base import first_fault
from schemas.dataset.entries import ShardEntry
from schemas.dataset.jobs_table import JobEntry, JobsTable, table_of
from schemas.names import CARD_PATH, JOBS_PATH
from service.errors import OptionRefused
from service.publish.card import Job, grouped, render_card, states_config


class _Shards(BaseModel):
    """A manifest's shards alone: the values of a million rejects would take gigabytes."""

    model_config = ConfigDict(extra="ignore")
    shards: Annotated[tuple[ShardEntry, ...], FailFast()]


def is_of_run(content: bytes, shards: Sequence[ShardEntry], is_whole: bool) -> bool:
    """Return whether a manifest has exactly these shards or, unless `is_whole`, at least these."""
    with suppress(ValidationError):
        theirs = _Shards.model_validate_json(content).shards
        return theirs == shards or (not is_whole and all(shard in theirs for shard in shards))
    return False


def merge(
    repo_id: str,
    job: Job,
    config: Mapping[str, str],
    card: bytes | None,
    table: bytes | None,
    manifests: Mapping[str, str],
) -> dict[str, bytes]:
    """Return card and table with `job` added; `manifests` maps other manifests' paths to sha256 or git id."""

    def refused(path: str, detail: str) -> OptionRefused:
        cure = f"name another repository, or bring {path} back as the last push of a job left it"
        return OptionRefused(f"{path} in {repo_id} {detail}", field="hub.repo_id", cure=cure)

    try:
        existing = None if card is None else card.decode()
    except UnicodeDecodeError as error:
        raise refused(CARD_PATH, "is not UTF-8") from error
    try:
        rows = JobsTable.model_validate_json(table).counting(manifests) if table is not None else {}
    except ValidationError as error:
        raise refused(JOBS_PATH, f"is not a table of this version: {first_fault(error)}") from error
    for path in manifests:
        if path not in rows:
            raise refused(JOBS_PATH, f"does not list {path} as it is there")
    others = list(rows.values())
    if isinstance(job, JobEntry):
        jobs = _placed([*others, job], config, existing)
        return {CARD_PATH: render_card(jobs, config, existing).encode(), JOBS_PATH: table_of(jobs).encode()}
    beside: list[Job] = [*others, job]
    grouped(beside, config, existing)
    return {}


def _placed(jobs: Sequence[JobEntry], config: Mapping[str, str], existing: str | None) -> list[JobEntry]:
    """Return the rows with the configurations that the card gives them: without a card, the rows decide.

    Only the card had them where a push chose another one than the job's request names.
    """
    return [
        row if states_config(row.config_name) == name else row.model_copy(update={"config_name": name})
        for name, group in grouped(jobs, config, existing).items()
        for row in group
    ]
