"""One of several passes over a source, in an order of its own."""

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from schemas.digest import canonical_sha256
from service.plan.sources.rows import RowSource, SourceRow

SHUFFLED_ROWS = 1000
"""Size of the shuffle buffer, as in `datasets`: each new row replaces one that is drawn."""


@dataclass(frozen=True, slots=True)
class OnePass:
    """The rows of `source` in pass `number`, from 0; shuffled by `seed` unless it is None.

    If there are several passes, the id of each row ends with its pass: `doc-7#1`. This includes the first
    pass, since the source itself may have an id `doc-7#2`.
    """

    source: RowSource
    number: int
    seed: int | None
    is_only: bool

    def listed(self) -> "OnePass":
        """Return the pass over the source with its files listed. Raises SourceRefused."""
        return replace(self, source=self.source.listed())

    def fingerprint(self, watch: Callable[[], None] = lambda: None) -> str:
        """Return the source's fingerprint combined with the seed: it is the same in every pass."""
        digest = self.source.fingerprint(watch)
        return digest if self.seed is None else f"shuffled:{canonical_sha256([digest, self.seed])}"

    def check_unchanged(self) -> None:
        """Check the source."""
        self.source.check_unchanged()

    def frozen(self) -> object:
        """Return what fixes the source."""
        return self.source.frozen()

    def rows(self) -> Iterator[SourceRow]:
        """Yield the rows."""
        rows = self.source.rows()
        for row in rows if self.seed is None else self._shuffled(rows):
            yield row if self.is_only else replace(row, source_id=f"{row.source_id}#{self.number + 1}")

    def _shuffled(self, rows: Iterator[SourceRow]) -> Iterator[SourceRow]:
        draw = random.Random(f"{self.seed}/{self.number}")  # noqa: S311 - an order, no secret
        packed = map(pickle.dumps, rows)  # token ids take a seventh of the memory so
        waiting = list(islice(packed, SHUFFLED_ROWS))
        for row in packed:
            place = draw.randrange(SHUFFLED_ROWS)
            yield pickle.loads(waiting[place])  # noqa: S301 - our own
            waiting[place] = row
        draw.shuffle(waiting)
        yield from map(pickle.loads, waiting)
