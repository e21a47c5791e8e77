"""What `quarry verify` counts and finds wrong while it reads a job's files, for its result and for reports.

Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

import errno
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Generic, Self, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from schemas.base import Wire
from schemas.dataset.manifest import Manifest
from schemas.dataset.shard import LightRow
from schemas.dataset.token_counts import TokenTally
from service.proof.layer_tally import LayerTally
from service.proof.logit_check import LogitReading, LogitVerdict

SHARE_BINS = 20
MAX_POINTS, MAX_FAULTY_POINTS = 1000, 200
SAMPLES = 3
_OF_DATASET = {None, errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG}
"""Values of `OSError.errno` that say something of the dataset, wherever it is read; None is pyarrow's own."""

Item = TypeVar("Item")


Printable = Annotated[str, AfterValidator(lambda text: text.encode(errors="backslashreplace").decode())]
"""Text with whatever is not UTF-8, as names of files may be, spelled out."""


class Finding(Wire):
    """One thing that is wrong, in the file at `path` inside the dataset.

    One that is `unread` could not be read here, as on a failing disk: the dataset itself may be right.
    """

    path: Printable
    what: Printable
    unread: bool = Field(default=False, exclude_if=lambda unread: not unread)

    @classmethod
    def of(cls, path: str, error: Exception) -> Self:
        """Return the finding for what was raised as the file was read."""
        cause, said = error.__cause__ or error, str(error) or "it takes too much memory"
        # A dataset's error names the file itself.
        what = said[len(path) :].lstrip(": ") if said.startswith(path) else f"cannot be read: {said}"
        return cls(path=path, what=what, unread=isinstance(cause, OSError) and cause.errno not in _OF_DATASET)


class Few(Generic[Item]):
    """The `limit` items whose names have the smallest hashes: effectively random, order-independent."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[tuple[int, str, Item]] = []

    def add(self, name: str, item: Item) -> None:
        """Keep `item` if the hash of its name is among the smallest."""
        rank = xxhash.xxh3_64_intdigest(name.encode(), seed=1)
        insort(self._kept, (rank, name, item), key=lambda kept: kept[:2])
        del self._kept[self._limit :]

    def items(self) -> list[Item]:
        """Return the kept items."""
        return [item for _, _, item in self._kept]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row to show in a report."""

    shard: str
    row: int
    light: LightRow


@dataclass(slots=True)
class JobTally:
    """The tally of one job.

    Over its rows, `sample_ids` and `lengths` count values, and `shares` is a histogram of the supervised
    share in `SHARE_BINS` bins.

    `findings` lists everything that is wrong. Only it and `sample_ids` grow with the data; the latter is
    cleared once the whole job is read.
    """

    findings: list[Finding] = field(default_factory=list)
    sample_ids: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    supervised: TokenTally = field(default_factory=TokenTally)
    shares: NDArray[np.int64] = field(default_factory=lambda: np.zeros(SHARE_BINS, np.int64))
    unsupervised_rows: int = 0
    consumed_shards: int = 0
    samples: Few[Sample] = field(default_factory=lambda: Few(SAMPLES))
    layers: dict[int, LayerTally] = field(default_factory=dict)
    logit_rows: int = 0
    logit_argmax_agree: int = 0
    logit_max_error: float = 0.0
    points: Few[LogitReading] = field(default_factory=lambda: Few(MAX_POINTS))
    faulty_points: Few[LogitReading] = field(default_factory=lambda: Few(MAX_FAULTY_POINTS))

    @property
    def rows(self) -> int:
        """Number of rows read."""
        return self.lengths.total()

    @property
    def tokens(self) -> int:
        """Number of tokens in these rows."""
        return sum(length * rows for length, rows in self.lengths.items())

    @property
    def supervised_tokens(self) -> int:
        """Number of supervised tokens in these rows."""
        return self.supervised.counts().total()

    def fault(self, path: str, what: str, *, unread: bool = False) -> None:
        """Record a finding for the file at `path`."""
        self.findings.append(Finding(path=path, what=what, unread=unread))

    def layer(
        self, layer_id: int, states_TH: torch.Tensor, low_T: torch.Tensor, high_T: torch.Tensor
    ) -> None:
        """Count one layer of one row; takes the arguments of `LayerTally.add`."""
        self.layers.setdefault(layer_id, LayerTally()).add(states_TH, low_T, high_T)

    def row(self, shard: str, row: int, light: LightRow) -> None:
        """Count a row's sample id, length and mask, and keep the row if it is one to show."""
        supervised = light.input_ids[light.loss_mask == 1]
        self.sample_ids[light.sample_id] += 1
        self.lengths[light.num_tokens] += 1
        self.supervised.add(supervised)
        self.shares[min(SHARE_BINS - 1, SHARE_BINS * len(supervised) // light.num_tokens)] += 1
        self.unsupervised_rows += not len(supervised)
        self.samples.add(light.sample_id, Sample(shard, row, light))

    def logits(self, shard: str, verdict: LogitVerdict) -> None:
        """Count a shard's logit check; keep some of its readings and, separately, some with faults."""
        self.logit_rows += verdict.rows
        self.logit_argmax_agree += verdict.argmax_agree
        self.logit_max_error = max(self.logit_max_error, verdict.max_error)
        for fault in verdict.faults:
            self.fault(shard, fault)
        for reading in verdict.readings:
            kept = self.faulty_points if reading.fault else self.points
            kept.add(f"{shard} {reading.where}", reading)


DatasetTally = list[tuple[Manifest, JobTally]]
"""Every job of a dataset whose manifest could be read, with its tally."""
