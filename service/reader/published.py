"""A job read through its folder or repository, where all its units appear once it is published."""

import logging
import time
from collections.abc import Callable
from functools import cached_property, partial
from itertools import groupby
from typing import TypeVar

from schemas.dataset.errors import DatasetError
from schemas.job import JobState, UnitPage, UnitView
from schemas.names import index_path, manifest_path
from service.artifacts.dataset_files import HUB_PREFIX, Files, files_of, repository_of
from service.errors import HubUnavailable
from service.reader.errors import ReaderError
from service.reader.jobs import check_norm, read_jobs
from service.reader.row import About
from service.reader.served import NotServed

LOOK_S = 5.0
"""Time between two looks for a manifest; each is a request to the Hub if the dataset is there."""

logger = logging.getLogger(__name__)


T = TypeVar("T")


def patiently(ask: Callable[[], T], patience_s: float) -> T:
    """Return `ask()`, retried while the Hub is unavailable. Raises HubUnavailable after `patience_s`."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except HubUnavailable as error:
            if time.monotonic() + LOOK_S > until_s:
                raise
            logger.warning("%s; asking again", error)
        time.sleep(LOOK_S)


class PublishedJob:
    """One job of a dataset, with the interface of `ServedJob`. Its units are in the plan's order."""

    def __init__(self, dataset: str, job_id: str, patience_s: float) -> None:
        self._dataset, self._job_id, self._patience_s, self._is_said = dataset, job_id, patience_s, False
        self._files: Files | None = None
        self.about: About | None = None
        """What the manifest says of every shard, once there is one."""
        self._faulty_s: float | None = None
        """When an unreadable manifest was first seen."""
        self.name = f"job {job_id} of {dataset}"

    def page(self, after: int, wait_s: int = 0) -> UnitPage:
        """Return the first unit numbered above `after`; none if the job is not published within `wait_s`.

        Raises ReaderError if the manifest stays faulty for `patience_s`; OptionRefused, HubUnavailable.
        """
        until_s = time.monotonic() + wait_s
        while (missing := self._missing()) is not None:
            if not self._is_said:
                logger.warning("%s is not published yet; waiting (%s)", self.name, missing)
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
            repository=repository_of(self._dataset) if is_remote else None,
        )

    def problem(self) -> str:
        """Return an empty string: a dataset does not record why a job rests."""
        return ""

    def file_range(self, path: str, offset: int, num_bytes: int) -> tuple[bytes, int]:
        """Return a range of a file of the published dataset, and the file's length. Raises NotServed."""
        try:
            file = self.published.open(path)
        except DatasetError as error:
            raise NotServed(f"{self.name}: {error}") from error
        return file.read(offset, min(num_bytes, file.num_bytes - offset)).tobytes(), file.num_bytes

    def acknowledge(self, consumer: str, after: int, expires_s: int | None) -> None:
        """Raise ReaderError: only a service has consumers."""
        raise ReaderError(f"{self.name} is not asked of a service, which alone has consumers")

    @property
    def published(self) -> Files:
        """The files of the dataset; for a repository, at the commit in which the manifest was found."""
        assert self._files is not None, "a page with units was read from them"  # noqa: S101
        return self._files

    def _missing(self) -> str | None:
        """Return what is still missing: the folder, the manifest, or a part of it that is being copied."""
        if self._files is not None:
            return None
        try:
            files = patiently(partial(files_of, self._dataset), self._patience_s)
            is_there = manifest_path(self._job_id) in patiently(files.manifests, self._patience_s)
        except (ReaderError, OSError) as error:
            return str(error)
        try:
            read = patiently(partial(read_jobs, files, frozenset([self._job_id])), self._patience_s)
            patiently(partial(check_norm, files, read), self._patience_s)
        except (ReaderError, OSError) as error:
            if not is_there:
                self._faulty_s = None
                return str(error)
            self._faulty_s = self._faulty_s or time.monotonic()
            if time.monotonic() - self._faulty_s > self._patience_s:
                raise
            return str(error)
        self._files, self._manifest = files, read[self._job_id]
        self.about = About.of(self._manifest.provenance)
        return None

    @cached_property
    def _units(self) -> list[UnitView]:
        """The units that have rows, ordered by number."""
        is_remote, indexes = self._dataset.startswith(HUB_PREFIX), self._manifest.indexes
        left = set(self.published.paths()) if self._manifest.is_consumed else None
        index_of = {entry.path: entry for entry in indexes}
        by_unit = groupby(sorted(self._manifest.shards, key=lambda entry: entry.unit), lambda e: e.unit)
        return [
            UnitView(
                unit=unit,
                epoch=shards[0].epoch,
                shards=shards,
                index=index_of[index_path(self._job_id, unit)],
                in_folder=not is_remote and (left is None or all(shard.path in left for shard in shards)),
                in_repository=is_remote,
            )
            for unit, group in by_unit
            if (shards := tuple(group))
        ]
