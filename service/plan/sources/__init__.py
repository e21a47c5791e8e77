"""Sources: yield rows of inline samples, allowed files or Hub datasets, each a sample or a named reject."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from schemas.source import FileSource, HubSource, InlineSource, MixSource, PostedSource, Source
from service.errors import SourceRefused
from service.plan.sources.files import FileRows
from service.plan.sources.hub import HubRows
from service.plan.sources.mix import MixedRows, refusing_part
from service.plan.sources.one_pass import OnePass
from service.plan.sources.rows import InlineRows, RejectReason, RowReject, RowSource, SourceRow
from service.settings import Settings

__all__ = ["RejectReason", "RowReject", "RowSource", "SourceRow", "open_source", "without_token"]


def open_source(
    source: Source,
    settings: Settings,
    frozen: Any = None,  # noqa: ANN401 - as `RowSource.frozen` said it
    *,
    labels: tuple[str, ...] = (),
    may_be_empty: bool = False,
    posted: Path | None = None,
    document: str | None = None,
    number: int = 0,
) -> RowSource:
    """Open a source; for the Hub, check that it may be read. Raises SourceRefused, HubUnavailable.

    With `frozen`, the source is opened as it was when `RowSource.frozen` returned that. `labels` are columns
    that its samples keep as labels. A folder without files is refused, unless `may_be_empty`. `posted` is the
    folder of the posted samples that a schedule's job took. `document` is the whole request, for a `source`
    that has only its first sample. `number` is the number of the pass over a repeated source.
    """
    rows: RowSource
    match source:
        case InlineSource():
            rows = InlineRows(source, document)
        case FileSource():
            # Earlier builds froze the names alone.
            planned = dict.fromkeys(frozen) if isinstance(frozen, list) else frozen
            rows = FileRows(
                source, settings.source_roots, labels, planned, may_be_empty, settings.closed_folder
            )
        case HubSource():
            pinned = source if frozen is None else source.model_copy(update={"revision": frozen})
            rows = HubRows.find(pinned, settings, labels)
        case PostedSource():
            if posted is None:
                cure = "make a schedule of this request, and post the samples to it"
                raise SourceRefused("samples are posted to a schedule", field="source.kind", cure=cure)
            folder = FileSource(kind="file", path=str(posted))
            names = None if frozen is None else dict.fromkeys(frozen)  # the data folder may have been moved
            return FileRows(folder, (posted,), labels, names, may_be_empty=True)
        case MixSource():
            opened = partial(open_source, settings=settings, labels=labels, may_be_empty=may_be_empty)
            parts: list[RowSource] = []
            for place, part in enumerate(source.sources):
                with refusing_part(place):
                    parts.append(opened(part.source, frozen=None if frozen is None else frozen[place]))
            weights = tuple(part.weight for part in source.sources if part.weight is not None)
            rows = MixedRows(tuple(parts), weights or None)
    return rows if source.is_as_it_stands else OnePass(rows, number, source.seed, source.repeat == 1)


def without_token(source: RowSource) -> RowSource:
    """Return the source without its token, for a child that lists files and does not read from the Hub."""
    if isinstance(source, MixedRows):
        return replace(source, parts=tuple(map(without_token, source.parts)))
    if isinstance(source, OnePass):
        return replace(source, source=without_token(source.source))
    return replace(source, token=False) if isinstance(source, HubRows) else source
