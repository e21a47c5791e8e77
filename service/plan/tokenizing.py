"""A source's rows -> what became of each: tokens or a reject."""

from collections.abc import Iterator

from service.plan.planner import RowOutcome
from service.plan.sources import RowReject, RowSource
from service.plan.tokens import SampleTokenizer


def outcomes(source: RowSource, tokenizer: SampleTokenizer) -> Iterator[RowOutcome]:
    """Tokenize the rows one by one, in order. Raises what the source and the template raise."""
    for row in source.rows():
        result = row.content if isinstance(row.content, RowReject) else tokenizer.encode(row.content)
        yield RowOutcome(row.position, row.source_id, result)
