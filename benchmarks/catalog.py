"""The engine rows by name: in which engine each runs, and what it stores; see benchmarks/README.md."""

from dataclasses import dataclass

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class RowKind:
    """One row of the table.

    `engine` names the process that it runs in (`benchmarks.rows.engines.ENGINES`): rows of one engine share
    it. `least_stored` is the least share of the states' bytes that the row must leave behind.
    """

    engine: str
    label: str
    least_stored: float = 1.0
    by_default: bool = True
    peer: bool = False
    """Another way to stored states, which Quarry is compared with."""


ROWS = {
    PLAIN: RowKind("plain", "plain prefill", 0.0),
    "disk": RowKind("disk", "no engine: the bytes written, durable, read back", by_default=False),
    "capture": RowKind("capture", "the capture alone, no connector", 0.0),
    "quarry": RowKind("quarry", "Quarry: checked, sealed, durable, proven"),
    "quarry-planes": RowKind("quarry", "Quarry with `planes`", 0.5),
    "quarry-fp8": RowKind("quarry", "Quarry with `fp8`", 0.5),
    "quarry-memory": RowKind("quarry", "Quarry into memory", by_default=False),
    "quarry-slow": RowKind("quarry-slow", "Quarry on a disk of 0.2 GB/s", by_default=False),
    "example": RowKind("example", "vLLM's example connector, batch", peer=True),
    "example-synced": RowKind(
        "example", "vLLM's example connector, batch, each file durable", by_default=False, peer=True
    ),
    "example-memory": RowKind(
        "example", "vLLM's example connector, batch, into memory", by_default=False, peer=True
    ),
    "example-consumed": RowKind("locked", "vLLM's example connector, lock and consume", peer=True),
}


def rows_of(names: list[str] | None) -> tuple[str, ...]:
    """Return the rows to run, in the table's order: the named ones or the default, and always plain."""
    chosen = {PLAIN, *(names or [name for name, kind in ROWS.items() if kind.by_default])}
    return tuple(name for name in ROWS if name in chosen)
