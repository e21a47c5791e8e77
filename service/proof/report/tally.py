"""What the page shows of a job, counted while `quarry verify` reads it. Its size does not grow with the data.

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
from service.proof.logit_check import LogitReading
from service.proof.report.layer_tally import LayerTally

SHARE_BINS = 20
MAX_POINTS, MAX_FAULTY_POINTS = 1000, 200
SAMPLES = 3
HEAD_TOKENS, TAIL_TOKENS = 320, 80

Item = TypeVar("Item")


class Few(Generic[Item]):
    """The `limit` items whose names have the smallest hashes: as good as drawn, and the same in any order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[tuple[int, str, Item]] = []

    def takes(self, name: str) -> bool:
        """Say whether an item of this name would be kept."""
        return len(self._kept) < self._limit or _rank(name) < self._kept[-1][0]

    def add(self, name: str, item: Item) -> None:
        """Keep `item` if its name is among the smallest."""
        if self.takes(name):
            insort(self._kept, (_rank(name), name, item), key=lambda kept: kept[:2])
            del self._kept[self._limit :]

    def merge(self, other: "Few[Item]") -> None:
        """Take in what another has kept."""
        for _, name, item in other._kept:
            self.add(name, item)

    def items(self) -> list[Item]:
        """Return what is kept."""
        return [item for _, _, item in self._kept]


def _rank(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(), seed=1)


@dataclass(frozen=True, slots=True)
class SamplePart:
    """Consecutive tokens of a row from `start` on: their ids, and whether each is supervised."""

    start: int
    ids: tuple[int, ...]
    supervised: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row to show: its first tokens, and its last where it is too long to be shown whole."""

    shard: str
    row: int
    sample_id: str
    source_id: str | None
    num_tokens: int
    prompt_tokens: int
    supervised_tokens: int
    parts: tuple[SamplePart, ...]


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
        """Take one layer of one row; arguments as of `LayerTally.add`."""
        if layer_id not in self.layers:
            self.layers[layer_id] = LayerTally()
        self.layers[layer_id].add(states_TH, low_T, high_T)

    def row(self, shard: str, row: int, light: LightRow) -> None:
        """Count a row's length and mask, and keep it if it is one to show."""
        supervised = int(np.count_nonzero(light.loss_mask))
        self.lengths[light.num_tokens] += 1
        self.supervised_tokens += supervised
        self.shares[min(SHARE_BINS - 1, SHARE_BINS * supervised // light.num_tokens)] += 1
        self.unsupervised_rows += not supervised
        if self.samples.takes(light.sample_id):
            about = (light.sample_id, light.source_id, light.num_tokens, light.prompt_tokens, supervised)
            self.samples.add(light.sample_id, Sample(shard, row, *about, tuple(_parts(light))))

    def logits(self, shard: str, readings: Iterable[LogitReading]) -> None:
        """Keep some of a shard's readings of the logit check, and apart from them some that are faults."""
        for reading in readings:
            kept = self.faulty_points if reading.fault else self.points
            kept.add(f"{shard} {reading.where}", reading)

    def settle(self) -> None:
        """Count what waits in the layers. The numbers are whole only afterwards."""
        for layer in self.layers.values():
            layer.settle()

    def merge(self, other: "JobTally") -> None:
        """Take in what another has counted of the same job and settled."""
        for layer_id, layer in other.layers.items():
            self.layers.setdefault(layer_id, LayerTally()).merge(layer)
        self.lengths.update(other.lengths)
        self.supervised_tokens += other.supervised_tokens
        self.shares += other.shares
        self.unsupervised_rows += other.unsupervised_rows
        self.points.merge(other.points)
        self.faulty_points.merge(other.faulty_points)
        self.samples.merge(other.samples)


def _parts(light: LightRow) -> Iterable[SamplePart]:
    whole = light.num_tokens <= HEAD_TOKENS + TAIL_TOKENS
    head = light.num_tokens if whole else HEAD_TOKENS
    for start, stop in ((0, head), (light.num_tokens - TAIL_TOKENS, light.num_tokens))[: 1 if whole else 2]:
        ids, mask = light.input_ids[start:stop].tolist(), light.loss_mask[start:stop]
        yield SamplePart(start, tuple(ids), tuple((mask != 0).tolist()))


@dataclass(slots=True)
class DatasetTally:
    """Every job of a dataset whose manifest could be read, with what was counted of it."""

    jobs: list[tuple[Manifest, JobTally]] = field(default_factory=list)

    def job(self, manifest: Manifest) -> JobTally:
        """Begin a job and return what to count it in."""
        self.jobs.append((manifest, JobTally()))
        return self.jobs[-1][1]
