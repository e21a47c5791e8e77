"""Several sources as one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from schemas.digest import canonical_sha256
from service.errors import SourceRefused
from service.plan.sources.rows import RowSource, SourceRow

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class MixedRows:
    """The rows of `parts`, one part after another, or in proportion to `weights` until a part ends.

    The id of a row begins with its part's number: `1/` is the second.
    """

    parts: tuple[RowSource, ...]
    weights: tuple[float, ...] | None

    def listed(self) -> "MixedRows":
        """Return the mix with the files of every part listed. Raises SourceRefused."""
        return replace(self, parts=tuple(self._each(lambda part: part.listed())))

    def fingerprint(self, watch: Callable[[], None] = lambda: None) -> str:
        """Return the sha256 over the parts' fingerprints and the weights."""
        return f"mix:{canonical_sha256([self._each(lambda part: part.fingerprint(watch)), self.weights])}"

    def check_unchanged(self) -> None:
        """Check each part."""
        self._each(lambda part: part.check_unchanged())

    def frozen(self) -> object:
        """Return what fixes each part."""
        return [part.frozen() for part in self.parts]

    def rows(self) -> Iterator[SourceRow]:
        """Yield the rows."""
        numbered = [_numbered(number, part) for number, part in enumerate(self.parts)]
        return chain.from_iterable(numbered) if self.weights is None else interleaved(numbered, self.weights)

    def _each(self, ask: Callable[[RowSource], Answer]) -> list[Answer]:
        answers = []
        for number, part in enumerate(self.parts):
            with refusing_part(number):
                answers.append(ask(part))
        return answers


@contextmanager
def refusing_part(number: int) -> Iterator[None]:
    """Prefix the field of a part's refusal with the part's place in the mix."""
    try:
        yield
    except SourceRefused as error:
        field = f"source.sources.{number}.{error.field}"
        raise SourceRefused(error.detail, field=field, cure=error.cure) from error


def interleaved(parts: list[Iterator[SourceRow]], weights: tuple[float, ...]) -> Iterator[SourceRow]:
    """Yield from the parts in proportion to their weights until one of them ends.

    Smooth weighted round robin: after every row, each part has contributed its share, to within as many rows
    as there are parts.
    """
    owed = [0.0] * len(parts)
    total = sum(weights)
    while True:
        owed = [debt + weight for debt, weight in zip(owed, weights, strict=True)]
        number = owed.index(max(owed))
        owed[number] -= total
        row = next(parts[number], None)
        if row is None:
            return
        yield row


def _numbered(number: int, part: RowSource) -> Iterator[SourceRow]:
    with refusing_part(number):
        for row in part.rows():
            yield replace(row, source_id=f"{number}/{row.source_id}")
