"""The map-style dataset: every row of the complete jobs of a folder or repository."""

import hashlib
import os
from collections.abc import Iterable
from datetime import date

import pyarrow as pa

from schemas.names import FINAL_NORM_PATH
from service.artifacts.dataset_files import Files, files_of, read_file
from service.reader.errors import JobsDiffer, ReaderError
from service.reader.jobs import read_jobs
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
    ) -> None:
        """Read the manifests, the indexes that they name and one footer; no states.

        Args:
            where: a folder in the layout of a dataset repository, or `hf://datasets/NAMESPACE/NAME`, or the
                files of either, opened before.
            view: what to make of a row; without one, rows come as they are stored.
            jobs: ids of the jobs whose rows are wanted, each complete; all complete ones if null. A job is
                complete when its manifest is there.
            since: read only jobs whose last state was captured then or later: a day, which begins at midnight
                UTC, or a time with its offset; either may be given as text.
            revision: branch, tag or commit, for a repository. Ranks that open one that is pushed to need a
                commit: give them the first rank's `revision`, or they may share out other rows.
            pin_memory: read states straight into pinned memory.
            direct: read local shards by O_DIRECT, past the page cache. For shards that are larger together
                than the memory: it takes less CPU than a read from the disk through the cache.

        Raises:
            ReaderError: no dataset, no complete job or not the one named, none since then, or a view it
                cannot serve; JobsDiffer if the jobs are of several models or layers.
            OptionRefused, HubUnavailable: the Hub refuses the repository, or does not answer.
        """
        files: Files = files_of(where, revision) if isinstance(where, str | os.PathLike) else where
        wanted = frozenset(jobs) if jobs is not None else None
        self.manifests = read_jobs(files, wanted, since)
        """Of the jobs that are read, by id: they name every file that is."""
        self.revision: str | None = files.revision
        """The commit of the repository that is read; null of a folder."""
        jobs_read = self.manifests.values()
        self._check_alike()
        self._check_norm(files)
        self._indexes = [entry for job in jobs_read for entry in job.indexes]
        super().__init__(
            files,
            [entry for job in jobs_read for entry in job.shards],
            read_places(files, self._indexes),
            view,
            pin_memory=pin_memory,
            direct=direct,
        )

    def _check_alike(self) -> None:
        """Raise JobsDiffer for jobs of several models, layers or forms of states."""
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

    def _check_norm(self, files: Files) -> None:
        """Hold the one norm of a dataset against each job's. Raises ReaderError."""
        sha256 = hashlib.sha256(read_file(files, FINAL_NORM_PATH)).hexdigest()
        for job, manifest in self.manifests.items():
            if sha256 not in {entry.sha256 for entry in manifest.extras if entry.path == FINAL_NORM_PATH}:
                raise ReaderError(
                    f"{FINAL_NORM_PATH} is not that of job {job}, so that its last layer would be normed as "
                    "another model's: a folder holds jobs of one model; copy the job's own beside it"
                )

    @property
    def index(self) -> pa.Table:
        """What the index files say of every row: the columns `service.reader.places.COLUMNS`."""
        return self._places.table

    @property
    def sample_ids(self) -> list[str]:
        """The id of every row's sample."""
        ids: list[str] = self.index["sample_id"].to_pylist()
        return ids

    def labels(self, name: str) -> list[str | None]:
        """Return a label of every row, null where it has none. Raises ReaderError if no job asked for it."""
        return read_labels(self._files, self._indexes, name)

    def supervised_counts(self) -> dict[int, int]:
        """Return how often each token id is supervised in all rows, from the index."""
        return self._places.supervised_counts()
