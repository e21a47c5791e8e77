"""The engine rows by name: in which engine each runs, what it stores, and what its figures count. Pure."""

from dataclasses import dataclass

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class RowKind:
    """One row of the table.

    `engine` names the process that it runs in (`benchmarks.rows.ENGINES`): rows of one engine share it.
    `least_stored` is the least share of the states' bytes that it may leave behind and count as done.
    """

    engine: str
    label: str
    note: str
    least_stored: float = 1.0
    by_default: bool = True
    answers: bool = True
    """Can run a workload that generates."""
    peer: bool = False
    """Another way to stored states, which Quarry is held against."""


ROWS = {
    PLAIN: RowKind(
        "plain", "plain prefill", "Counted until the last answer. No capture; nothing is stored.", 0.0
    ),
    "capture": RowKind(
        "capture",
        "the capture alone, no connector",
        "vLLM's extract_hidden_states stores the states in its own cache; nobody takes them out. Counted "
        "until the last answer.",
        0.0,
    ),
    "quarry": RowKind(
        "quarry",
        "Quarry: checked, sealed, durable, proven",
        "Counted until the last unit could be committed: rows checked and hashed, Parquet, fsync, rename, "
        "fsync of the folder, read back from the disk, plan and logits proven, index written, at default "
        "settings. The sha256 for the manifest is taken when a job is published, and not in this figure.",
    ),
    "quarry-ram": RowKind(
        "quarry",
        "the same, to a RAM disk",
        "The row above with its files in memory: no disk to wait for, but a core copies each byte, where a "
        "disk takes it by itself.",
    ),
    "quarry-planes": RowKind(
        "quarry",
        "Quarry with `planes`",
        "Quarry to disk with the lossless compression; the bytes are what is left of the states.",
        0.5,
    ),
    "quarry-fp8": RowKind(
        "quarry",
        "Quarry with `fp8`",
        "Quarry to disk with the lossy compression, each code proven when it is made; the bytes are those of "
        "codes and scales.",
        0.5,
    ),
    "unproven": RowKind(
        "quarry",
        "Quarry without the proof of sealed units",
        "Rows are checked as they are drained, and the engine is asked for its 16 likeliest tokens "
        "after each.",
        by_default=False,
    ),
    "unwitnessed": RowKind(
        "quarry",
        "Quarry with the drain's checks alone",
        "The row above without those tokens.",
        by_default=False,
    ),
    "unchecked": RowKind(
        "unchecked",
        "Quarry without the checks",
        "No row checks, no proof of plan and logits; all else is Quarry to disk. What it costs less is what "
        "the checks cost.",
        by_default=False,
    ),
    "example": RowKind(
        "example",
        "vLLM's example connector, batch",
        "Without lock files. Counted until each request's safetensors file opens with all its tokens. That "
        "is not durable: nobody calls fsync in this row, and nothing is checked. Pinned memory, CUDA streams "
        "and events are replaced by what a CPU has.",
        peer=True,
    ),
    "example-durable": RowKind(
        "example",
        "the same, with fsync",
        "The row above, and fsync of each file as soon as it is whole, beside the engine, then of their "
        "folder: they survive what Quarry's files survive. Still nothing is checked.",
        peer=True,
    ),
    "example-consumed": RowKind(
        "locked",
        "vLLM's example connector, lock and consume",
        "With lock files. Each request's answer names its file; a thread waits for its lock with vLLM's own "
        "load function, reads all tensors and deletes both files. Counted until the last one is read; "
        "nothing is kept, and GB and files are what passed.",
        peer=True,
    ),
    "speculators": RowKind(
        "locked",
        "speculators' offline flow over HTTP",
        "speculators' own generate-offline-data, 32 requests at once, in a process of its own, already "
        "started, against vLLM's OpenAI server over the engine of the row above: lock, move to the dataset's "
        "folder. Counted until its last file is moved; not durable, not validated (its default).",
        answers=False,
        peer=True,
    ),
    "transformers": RowKind(
        "transformers",
        "a transformers loop",
        "One forward pass a sample with output_hidden_states, no head, then torch.save of ids, mask, three "
        "layers side by side and the last one, as dump scripts do. Counted until the last file is written; "
        "not durable.",
        peer=True,
    ),
}


def rows_of(names: list[str] | None, workload: str) -> tuple[str, ...]:
    """Return the rows to run, in the table's order: the named ones or the default, and always plain.

    Raises ValueError for a named row that cannot run `workload`.
    """
    chosen = {PLAIN, *(names or [name for name, kind in ROWS.items() if kind.by_default])}
    if workload == "generate":
        mute = {name for name, kind in ROWS.items() if not kind.answers}
        if names and mute & chosen:
            raise ValueError(f"{', '.join(sorted(mute & chosen))} cannot generate")
        chosen -= mute
    return tuple(name for name in ROWS if name in chosen)


def engines_of(rows: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the engines that `rows` need, each with its rows."""
    names = dict.fromkeys(ROWS[row].engine for row in rows)
    return {name: tuple(row for row in rows if ROWS[row].engine == name) for name in names}
