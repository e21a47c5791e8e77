"""What a report shows of a job, counted while `quarry verify` reads it. Its size does not grow with the data.

Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from schemas.dataset.manifest import Manifest
from schemas.dataset.shard import LightRow
from service.proof.layer_tally import LayerTally
from service.proof.logit_check import LogitReading

SHARE_BINS = 20
MAX_POINTS, MAX_FAULTY_POINTS = 1000, 200
SAMPLES = 3

Item = TypeVar("Item")


class Few(Generic[Item]):
    """The `limit` items whose names have the smallest hashes: as good as random, the same in any order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[tuple[int, str, Item]] = []

    def add(self, name: str, item: Item) -> None:
        """Keep `item` if the hash of its name is among the smallest."""
        rank = xxhash.xxh3_64_intdigest(name.encode(), seed=1)
        insort(self._kept, (rank, name, item), key=lambda kept: kept[:2])
        del self._kept[self._limit :]

    def items(self) -> list[Item]:
        """Return what is kept."""
        return [item for _, _, item in self._kept]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row to show."""

    shard: str
    row: int
    light: LightRow


@dataclass(slots=True)
class JobTally:
    """One job: every layer, lengths, supervised shares in `SHARE_BINS`, logits, and a few samples."""

    layers: dict[int, LayerTally] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    supervised_tokens: int = 0
    shares: NDArray[np.int64] = field(default_factory=lambda: np.zeros(SHARE_BINS, np.int64))
    unsupervised_rows: int = 0
    points: Few[LogitReading] = field(default_factory=lambda: Few(MAX_POINTS))
    faulty_points: Few[LogitReading] = field(default_factory=lambda: Few(MAX_FAULTY_POINTS))
    samples: Few[Sample] = field(default_factory=lambda: Few(SAMPLES))

    def layer(
        self, layer_id: int, states_TH: torch.Tensor, low_T: torch.Tensor, high_T: torch.Tensor
    ) -> None:
        """Count one layer of one row; arguments are those of `LayerTally.add`."""
        self.layers.setdefault(layer_id, LayerTally()).add(states_TH, low_T, high_T)

    def row(self, shard: str, row: int, light: LightRow) -> None:
        """Count a row's length and mask, and keep it if it is one to show."""
        supervised = int(np.count_nonzero(light.loss_mask))
        self.lengths[light.num_tokens] += 1
        self.supervised_tokens += supervised
        self.shares[min(SHARE_BINS - 1, SHARE_BINS * supervised // light.num_tokens)] += 1
        self.unsupervised_rows += not supervised
        self.samples.add(light.sample_id, Sample(shard, row, light))

    def logits(self, shard: str, readings: Iterable[LogitReading]) -> None:
        """Keep some of a shard's readings of the logit check, and separately some that are faults."""
        for reading in readings:
            kept = self.faulty_points if reading.fault else self.points
            kept.add(f"{shard} {reading.where}", reading)


@dataclass(slots=True)
class DatasetTally:
    """Every job of a dataset whose manifest could be read, with what was counted of it."""

    jobs: list[tuple[Manifest, JobTally]] = field(default_factory=list)
