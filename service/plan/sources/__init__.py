"""Sources: inline samples, allowed files, Hub datasets -> rows, each a sample or a named reject."""

from schemas.request import FileSource, HubSource, InlineSource, Source
from service.plan.sources.files import FileRows
from service.plan.sources.hub import HubRows
from service.plan.sources.rows import InlineRows, RejectReason, RowReject, RowSource, SourceRow
from service.settings import Settings

__all__ = ["RejectReason", "RowReject", "RowSource", "SourceRow", "open_source"]


def open_source(source: Source, settings: Settings) -> RowSource:
    """Find the source and check that it may be read. Raises SourceRefused, HubUnavailable."""
    match source:
        case InlineSource():
            return InlineRows(source)
        case FileSource():
            return FileRows.find(source, settings.source_roots)
        case HubSource():
            return HubRows.find(source, settings)
