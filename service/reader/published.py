"""A job by its folder or repository: it tells of its units when it is published, and then of all."""

import logging
import time
from functools import cached_property
from itertools import groupby

from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import Manifest
from schemas.job import JobState, UnitPage, UnitView
from schemas.names import MANIFEST_FOLDER, index_path, manifest_path
from service.artifacts.dataset_files import HUB_PREFIX, Files, files_of
from service.reader.errors import ReaderError
from service.reader.jobs import read_jobs
from service.reader.served import NotServed

LOOK_S = 5.0
"""Between two looks for a manifest; each asks the Hub, where the dataset is there."""

logger = logging.getLogger(__name__)


class PublishedJob:
    """One job of a dataset, with what is asked of a job of a service. Its units come in the plan's order."""

    def __init__(self, dataset: str, job_id: str) -> None:
        """Look at nothing yet."""
        self._dataset, self._job_id, self._is_said = dataset, job_id, False
        self.files: Files | None = None
        """Those of the published dataset; a repository's at the commit that the manifest was found at."""
        self.name = f"job {job_id} of {dataset}"

    def page(self, after: int, wait_s: int = 0) -> UnitPage:
        """Return the first unit above number `after`; none if the job is not published within `wait_s`.

        Raises ReaderError, OptionRefused, HubUnavailable.
        """
        until_s = time.monotonic() + wait_s
        while not self._is_published():
            if not self._is_said:
                logger.warning("%s is not published yet; waiting", self.name)
                self._is_said = True
            if time.monotonic() >= until_s:
                return UnitPage(units=(), next_after=after, state=JobState.RUNNING)
            time.sleep(LOOK_S)
        is_remote = self._dataset.startswith(HUB_PREFIX)
        unit = next((unit for unit in self._units if unit.unit > after), None)
        return UnitPage(
            units=() if unit is None else (unit,),
            next_after=after if unit is None else unit.unit,
            state=JobState.COMPLETED,
            folder=None if is_remote else self._dataset,
            repository=self._dataset.removeprefix(HUB_PREFIX) if is_remote else None,
        )

    def problem(self) -> str:
        """Return nothing: a dataset does not say why a job rests."""
        return ""

    def file_range(self, path: str, offset: int, num_bytes: int) -> tuple[bytes, int]:
        """Return a range of a file of the published dataset, and the file's length. Raises NotServed."""
        assert self.files is not None, "a page with units was read from them"  # noqa: S101
        try:
            file = self.files.open(path)
        except DatasetError as error:
            raise NotServed(f"{self.name}: {error}") from error
        return file.read(offset, min(num_bytes, file.num_bytes - offset)).tobytes(), file.num_bytes

    def acknowledge(self, consumer: str, after: int, expires_s: int | None) -> None:
        """Raise ReaderError: consumers are a service's."""
        raise ReaderError(f"{self.name} is not asked of a service, which alone has consumers")

    def _is_published(self) -> bool:
        if self.files is None:
            files = files_of(self._dataset, None)
            if manifest_path(self._job_id) in files.find(MANIFEST_FOLDER, ".json"):
                self.files = files
        return self.files is not None

    @cached_property
    def _manifest(self) -> Manifest:
        assert self.files is not None, "it is asked for once the job is published"  # noqa: S101
        return read_jobs(self.files, frozenset([self._job_id]))[self._job_id]

    @cached_property
    def _units(self) -> list[UnitView]:
        """The units with rows, in the order of their numbers."""
        is_remote, indexes = self._dataset.startswith(HUB_PREFIX), self._manifest.indexes
        index_of = {entry.path: entry for entry in indexes}
        by_unit = groupby(sorted(self._manifest.shards, key=lambda entry: entry.unit), lambda e: e.unit)
        return [
            UnitView(
                unit=unit,
                epoch=shards[0].epoch,
                shards=shards,
                index=index_of[index_path(self._job_id, unit)],
                in_folder=not is_remote,
                in_repository=is_remote,
            )
            for unit, group in by_unit
            if (shards := tuple(group))
        ]
