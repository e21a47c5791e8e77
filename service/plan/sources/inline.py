"""Samples in the request itself."""

from collections.abc import Iterator
from dataclasses import dataclass

from schemas.digest import canonical_sha256
from schemas.request import InlineSource
from service.plan.sources.rows import SourceRow


@dataclass(frozen=True, slots=True)
class InlineRows:
    """The samples of the request, which the schema has checked."""

    source: InlineSource

    def fingerprint(self) -> str:
        """Return the sha256 of the samples' canonical JSON."""
        return f"inline:{canonical_sha256(self.source.model_dump(mode='json'))}"

    def rows(self) -> Iterator[SourceRow]:
        """Yield the samples."""
        for position, sample in enumerate(self.source.samples):
            yield SourceRow(position, sample.id or str(position), sample)
