"""`jobs.json`, next to the card: a row for each job of a repository, so that pushes read no other manifests.

A row is valid only as long as the manifest that it was made from is the one in the repository.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Self

from pydantic import AwareDatetime

from schemas.base import Wire
from schemas.dataset.entries import FileEntry, entry_of
from schemas.dataset.manifest import CheckReport, Manifest, Totals, VocabularyStats
from schemas.identity import Provenance
from schemas.names import manifest_path

MAX_TABLE_BYTES = 2**24
"""Of the table of jobs: some thousands of them. What a stranger wrote there may take sixty times as much."""


class JobEntry(Wire):
    """A job of a repository. `rejects` counts the rejected samples by reason.

    `config_name` is the configuration that its request names, or the one in which a push found or put it.
    """

    provenance: Provenance
    config_name: str
    totals: Totals
    checks: CheckReport
    rejects: dict[str, int]
    vocabulary: VocabularyStats
    first_shard: str
    captured_at: AwareDatetime
    manifest: FileEntry
    manifest_git_oid: str

    @classmethod
    def of(cls, manifest: Manifest, content: bytes) -> Self:
        """Return the row of a manifest whose file has this `content`."""
        hub = manifest.request.hub
        return cls(
            provenance=manifest.provenance,
            config_name=hub.config_name if hub else "default",
            totals=manifest.totals,
            checks=manifest.checks,
            rejects=dict(sorted(Counter(reject.reason for reject in manifest.rejects).items())),
            vocabulary=manifest.vocabulary,
            first_shard=manifest.shards[0].path,
            captured_at=manifest.captured_at,
            manifest=entry_of(manifest_path(manifest.provenance.job_id), content),
            manifest_git_oid=git_oid(content),
        )

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.provenance.job_id


class JobsTable(Wire):
    """The content of `jobs.json`, by job id."""

    jobs: tuple[JobEntry, ...]

    def counting(self, manifests: Mapping[str, str]) -> dict[str, JobEntry]:
        """Return the rows that were made from `manifests`, by path: each has its sha256 or git name."""
        return {
            row.manifest.path: row
            for row in self.jobs
            if manifests.get(row.manifest.path) in (row.manifest.sha256, row.manifest_git_oid)
        }


def table_of(jobs: Iterable[JobEntry]) -> str:
    """Return the content of `jobs.json`: the same jobs give the same text."""
    return JobsTable(jobs=tuple(sorted(jobs, key=lambda job: job.job_id))).model_dump_json(indent=1) + "\n"


def git_oid(content: bytes) -> str:
    """Return git's object id for a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
