"""The map-style dataset: every row of the complete jobs of a folder or repository."""

import os
from collections.abc import Iterable
from datetime import date

import pyarrow as pa

from service.artifacts.dataset_files import Files, files_of
from service.reader.errors import JobsDiffer
from service.reader.jobs import check_norm, read_jobs
from service.reader.places import read_labels, read_places
from service.reader.row import About
from service.reader.rows import Rows
from service.reader.views import View


class QuarryDataset(Rows):
    """Every row of a dataset in index order. Safe in DataLoader workers and from several threads."""

    def __init__(
        self,
        where: str | os.PathLike[str] | Files,
        view: View | None = None,
        *,
        jobs: Iterable[str] | None = None,
        since: str | date | None = None,
        revision: str | None = None,
        pin_memory: bool = False,
        direct: bool = False,
        check: bool = False,
    ) -> None:
        """Read the manifests, the indexes that they name and one shard's footer; no states.

        Args:
            where: a folder in the layout of a dataset repository, or `hf://datasets/NAMESPACE/NAME`, or the
                already opened files of either.
            view: converts rows for training; without one, rows are returned as stored.
            jobs: ids of the jobs to read, which must be complete; all complete jobs if None. A job is
                complete when its manifest exists.
            since: read only jobs whose last state was captured then or later: a day, which begins at midnight
                UTC, or a time with its UTC offset; either may be a string.
            revision: branch, tag or commit, for a repository. If the repository may be pushed to meanwhile,
                give every rank the first rank's `revision`: otherwise they may split different rows.
            pin_memory: read states straight into pinned memory.
            direct: read local shards with O_DIRECT, bypassing the page cache. Useful if the shards together
                are larger than memory: it takes less CPU than reading from disk through the cache.
            check: compare every index with its manifest's sha256, and every layer that is read with the
                checksum in its shard; a mismatch raises ReaderError, which names the file, and of a layer the
                row. Of a shard in a folder only the length, the job, the kind of states and the sample ids
                are compared with manifest and index: one exchanged for a shard of the same samples and
                length, right by itself, is read. `quarry verify` also holds every file against its sha256.

        Raises:
            ReaderError: no dataset, no complete job, a named job is not complete, no job since then, or the
                dataset lacks what the view needs; JobsDiffer if the jobs are of several models or layers.
            OptionRefused: the Hub refuses the repository. HubUnavailable: it does not answer.
        """
        files: Files = files_of(where, revision) if isinstance(where, str | os.PathLike) else where
        wanted = frozenset(jobs) if jobs is not None else None
        self.manifests = read_jobs(files, wanted, since)
        """The manifests of the jobs that are read, by job id; they name every file that is read."""
        self.revision: str | None = files.revision
        """The commit of the repository that is read; None for a folder."""
        jobs_read = self.manifests.values()
        about = self._check_alike()
        check_norm(files, self.manifests)
        self._indexes = [entry for job in jobs_read for entry in job.indexes]
        super().__init__(
            files,
            [entry for job in jobs_read for entry in job.shards],
            read_places(files, self._indexes, check=check),
            view,
            pin_memory=pin_memory,
            direct=direct,
            check=check,
            about=about,
        )

    def _check_alike(self) -> About:
        """Return what all jobs hold. Raises JobsDiffer if they differ in model, layers or form of states."""
        (first_job, first), *others = (
            (job, About.of(manifest.provenance)) for job, manifest in self.manifests.items()
        )
        for job, about in others:
            for name in About.__slots__:
                if (differs := getattr(about, name)) != (same := getattr(first, name)):
                    raise JobsDiffer(
                        f"the jobs {first_job} and {job} differ in {name}, {same} and {differs}: name jobs "
                        "that belong together"
                    )
        return first

    @property
    def index(self) -> pa.Table:
        """The index of every row: the columns `service.reader.places.COLUMNS`."""
        return self._places.table

    @property
    def sample_ids(self) -> list[str]:
        """The id of every row's sample."""
        ids: list[str] = self.index["sample_id"].to_pylist()
        return ids

    def labels(self, name: str) -> list[str | None]:
        """Return a label of every row, None if it has none. Raises ReaderError if an index lacks it."""
        return read_labels(self._files, self._indexes, name)

    def supervised_counts(self) -> dict[int, int]:
        """Return how often each token id is supervised over all rows, from the index."""
        return self._places.supervised_counts()
