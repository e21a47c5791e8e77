"""Formats figures as Markdown tables that also read well in a terminal. Pure."""

from collections.abc import Sequence

from benchmarks.summary import Spread


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of one column of text and others of figures. Raises ValueError for a short row."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [headers, rule, *rows]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


def ratio(figure: Spread) -> str:
    """Return a median with its ends, such as `0.97 (0.95..1.01)`."""
    return f"{figure.median:.2f} ({figure.low:.2f}..{figure.high:.2f})"


def gigabytes(num_bytes: float) -> str:
    """Return bytes as GB of 10^9."""
    return f"{num_bytes / 1e9:.2f}"
