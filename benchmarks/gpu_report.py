"""Sums up the GPU benchmark's turns and formats them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu_turns import GpuTurn
from benchmarks.harness import Spread, markdown, paired, spread

MODEL_ALONE = "model alone"

HEADERS = (
    "row",
    "GB/s",
    "of the base",
    "model's step / alone",
    "host us a request",
    "device MiB",
    "device allocations a request",
    "pinned allocations a request",
)


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """A row over all rounds; ratios are taken within a round."""

    bytes_per_s: Spread
    of_base: Spread
    step_ratio: Spread | None
    """A model's step beside this row against one alone; None where no model ran."""
    start_us: Spread
    """Host time to start a request."""
    device_mib: Spread
    """Device memory that a turn took and gave back, the stage not among it."""
    device_allocations: Spread
    pinned_allocations: Spread


def base_of(turns: Mapping[str, Sequence[GpuTurn]]) -> str:
    """Return the row that the others are compared with: the first one that moves bytes."""
    return next(name for name, of_row in turns.items() if all(turn.bytes for turn in of_row))


def figures(turns: Mapping[str, Sequence[GpuTurn]]) -> dict[str, GpuFigures]:
    """Return the figures of a cell's rows."""
    rates = {name: [turn.bytes / turn.seconds for turn in of_row] for name, of_row in turns.items()}
    base = rates[base_of(turns)]
    alone = [turn.step_s for turn in turns.get(MODEL_ALONE, ())]
    return {
        name: GpuFigures(
            bytes_per_s=spread(rates[name]),
            of_base=paired(rates[name], base),
            step_ratio=paired([turn.step_s for turn in of_row], alone) if alone else None,
            start_us=spread(turn.start_s / max(1, turn.requests) * 1e6 for turn in of_row),
            device_mib=spread(turn.device_bytes / 2**20 for turn in of_row),
            device_allocations=spread(turn.device_allocations / max(1, turn.requests) for turn in of_row),
            pinned_allocations=spread(turn.pinned_allocations / max(1, turn.requests) for turn in of_row),
        )
        for name, of_row in turns.items()
    }


def table(of_cell: Mapping[str, GpuFigures]) -> str:
    """Return a cell's table."""
    rows = [
        (
            name,
            f"{row.bytes_per_s.median / 1e9:.2f}",
            str(row.of_base),
            "" if row.step_ratio is None else f"{row.step_ratio.median:.4f}",
            f"{row.start_us.median:.0f}",
            f"{row.device_mib.median:.0f}",
            f"{row.device_allocations.median:.1f}",
            f"{row.pinned_allocations.median:.1f}",
        )
        for name, row in of_cell.items()
    ]
    return markdown(HEADERS, rows)
