"""Samples in the request itself."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schemas.request import InlineSource
from service.plan.sources.rows import SourceRow


@dataclass(frozen=True, slots=True)
class InlineRows:
    """The samples of the request, which the schema has checked."""

    source: InlineSource

    def fingerprint(self) -> str:
        """Return the sha256 of the samples' canonical JSON."""
        text = json.dumps(self.source.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return f"inline:{hashlib.sha256(text.encode()).hexdigest()}"

    def opened(self) -> dict[str, Any]:
        """Return nothing: the request holds the samples."""
        return {}

    def rows(self) -> Iterator[SourceRow]:
        """Yield the samples."""
        for position, sample in enumerate(self.source.samples):
            yield SourceRow(position, sample.id or str(position), sample)
