"""The end of the part `bytes`: the rate of the link, the rate of the gather, and what a model beside it pays.

A turn moves states of random numbers from a paged cache to pinned memory; no engine runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmarks.gpu.cache import (
    HIDDEN_SIZE,
    LAYOUTS,
    LENGTHS,
    NUM_LAYERS,
    NUM_SLOTS,
    Request,
    random_cache,
    random_requests,
    view_BLSH,
)
from benchmarks.gpu.figures import Save
from benchmarks.gpu.turns import Beside, Model, Turn, drain_alone, drain_beside
from benchmarks.gpu.ways import POOL_BYTES, PinnedWay, QuarryWay, Way
from benchmarks.harness import Spread, markdown, paired, run_rounds, shuffled_rounds, spread
from connector.cuda_gather import STAGE_BYTES
from connector.pool import HostPool

DRAIN_BYTES = 6 * 2**30
"""States of a turn that drains alone."""

PIECE = Request((), 2048)
"""64 MiB: the copies that the link is measured with."""

ALONE, BUSY, AN_8B = "alone", "beside a model", "at an 8B model's pace"

PACES = {
    ALONE: None,
    # So little arithmetic, about 4 ms a step, that the drain is the bound: 60 GB of states a second of it.
    BUSY: Beside(num_steps=40, num_products=3),
    # 16 GFLOP a token, 131 TFLOP a step of 8192 tokens.
    AN_8B: Beside(num_steps=6, num_products=136),
}

PINNED, MODEL, QUARRY = "pinned copy", "model alone", "Quarry"

RATE, SHARE, STEP = "GB/s", "of the pinned copy", "model's step / alone"


@dataclass(frozen=True)
class Row:
    """One way's work in every turn."""

    way: Way
    requests: Sequence[Request]
    beside: Beside | None


Cell = dict[str, Row]
"""Rows that are compared with each other."""


def run_row(cell: Cell, model: Model, name: str, number: int) -> Turn:
    """Run one turn; it lasts until all is on the host, or the model's last step has ended."""
    row = cell[name]
    torch.cuda.synchronize()
    if row.beside is None:
        return drain_alone(row.way, row.requests)
    return drain_beside(row.way, row.requests, model, row.beside)


def measure_drain(cache_bytes: int, seed: int, num_rounds: int, save: Save) -> None:
    """Run every cell: a turn of each row that does not count, then rounds, each in an order of its own."""
    flat, pool, model = random_cache(cache_bytes, seed), HostPool(POOL_BYTES, pinned=True), Model()
    save("shape", {"layers": NUM_LAYERS, "hidden_size": HIDDEN_SIZE, "block_slots": NUM_SLOTS})
    save("pool_bytes", POOL_BYTES)
    save("stage_bytes", STAGE_BYTES)
    for name, cell in cells(flat, pool, seed):
        orders = shuffled_rounds(list(cell), num_rounds, seed)
        turns = run_rounds(list(cell), orders, partial(run_row, cell, model))
        of_cell = figures(turns)
        print(f"\n{name}; rounds: {num_rounds}\n\n{table(of_cell)}", flush=True)
        summary = {
            row: {column: asdict(figure) for column, figure in of_row.items()}
            for row, of_row in of_cell.items()
        }
        rounds = {row: [asdict(turn) for turn in of_row] for row, of_row in turns.items()}
        save(f"drain, {name}", {"orders": orders, "rounds": rounds, "summary": summary})


def cells(flat: torch.Tensor, pool: HostPool, seed: int) -> Iterator[tuple[str, Cell]]:
    """Yield the rows that are compared with each other, by name."""
    link = PinnedWay(pool, PIECE.num_bytes)
    pieces = [PIECE] * (DRAIN_BYTES // PIECE.num_bytes)
    cache = view_BLSH(flat, LAYOUTS[0])
    ours = QuarryWay(cache, pool, STAGE_BYTES)
    for lengths in LENGTHS:
        requests = random_requests(lengths, DRAIN_BYTES, len(cache), seed)
        for pace, beside in PACES.items():
            if pace == AN_8B and lengths != "typical":
                continue
            cell = {PINNED: Row(link, pieces, beside)}
            if beside is not None:
                cell[MODEL] = Row(link, [], beside)
            cell[QUARRY] = Row(ours, requests, beside)
            yield f"{lengths}, {pace}", cell


def figures(turns: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, Spread]]:
    """Return each row's figures over all rounds, by column; ratios are taken within a round."""
    rates = {row: [turn.bytes / turn.seconds / 1e9 for turn in of_row] for row, of_row in turns.items()}
    steps_s = {row: [turn.step_s for turn in of_row] for row, of_row in turns.items()}
    found = {}
    for row, of_row in turns.items():
        columns = {RATE: spread(rates[row]), SHARE: paired(rates[row], rates[PINNED])}
        if MODEL in turns:
            columns[STEP] = paired(steps_s[row], steps_s[MODEL])
        found[row] = columns | {
            "host us a request": spread(turn.start_s / max(1, turn.requests) * 1e6 for turn in of_row),
        }
    return found


def table(of_cell: Mapping[str, Mapping[str, Spread]]) -> str:
    """Return a cell's table: medians, and the ends of what a row is judged by."""
    columns = list(of_cell[PINNED])
    rows = [
        (
            row,
            *(
                str(of_row[column]) if column == SHARE else f"{of_row[column].median:.4g}"
                for column in columns
            ),
        )
        for row, of_row in of_cell.items()
    ]
    return markdown(["row", *columns], rows)
