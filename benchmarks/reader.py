"""The reader and the exporter against others on the same rows: `python -m benchmarks.reader --save`.

Reading: `QuarryDataset` against the speculators trainer's own `ArrowDataset` on an export of the same rows,
beside a plain read() of the shard; with all files in the page cache, and with none; one row after another,
and by two threads. Writing: `quarry export` beside a sealed copy of the shard. One process, every row of a
round in an order of its own, rows held until a batch is whole. The trainer's package is what `make` installs
into `.cache/trainers`.
"""

import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.dataset import Shape, write_dataset
from benchmarks.harness import (
    Spread,
    command,
    command_line,
    keep,
    markdown,
    paired,
    positive,
    run_rounds,
    shuffled_rounds,
    spread,
)
from benchmarks.machine import machine_facts
from benchmarks.reader_turns import ExportBench, ReadBench, Turn
from benchmarks.trainers import TRAINERS
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.run import export

ROWS, EXPORT_ROWS, ROUNDS = 48, 32, 5
BASES = {"warm": "speculators", "cold": "speculators", "export": "copy"}
"""What each part is compared with."""

Turns = dict[str, list[Turn]]


def read_rows(folder: Path, shape: Shape, rounds: int, seed: int) -> dict[str, Turns]:
    """Measure reading; return the turns of the warm and the cold rounds."""
    dataset, exported = folder / "dataset", folder / "exported"
    write_dataset(dataset, folder / "scratch", shape)
    export(str(dataset), exported, ExportOptions(FormatName.SPECULATORS, Algorithm.EAGLE3))
    bench = ReadBench(dataset, exported)
    draw = random.Random(seed)

    def turn(kind: str, *, cold: bool) -> Turn:
        return bench.run(kind, draw.sample(range(len(bench)), len(bench)), cold=cold)

    warm, cold = bench.kinds(cold=False), bench.kinds(cold=True)
    return {
        "warm": run_rounds(warm, shuffled_rounds(warm, rounds, seed), lambda kind, _: turn(kind, cold=False)),
        "cold": run_rounds(cold, shuffled_rounds(cold, rounds, seed), lambda kind, _: turn(kind, cold=True)),
    }


def write_rows(folder: Path, shape: Shape, rounds: int, seed: int) -> Turns:
    """Measure the exports."""
    write_dataset(folder / "dataset", folder / "scratch", shape)
    bench = ExportBench(folder / "dataset", folder)
    kinds = list(bench.kinds)
    return run_rounds(kinds, shuffled_rounds(kinds, rounds, seed), lambda kind, _: bench.run(kind))


def figures(turns: Turns, shape: Shape, base: str) -> dict[str, dict[str, Any]]:
    """Return rates, and ratios to `base` within a round, of every kind."""
    rate = {kind: [shape.state_bytes / turn.seconds / 1e9 for turn in some] for kind, some in turns.items()}
    return {
        kind: {
            "gb_per_s": asdict(spread(rate[kind])),
            "rows_per_s": asdict(spread(shape.num_rows / turn.seconds for turn in some)),
            "cpu_s_per_gb": asdict(spread(turn.cpu_s / shape.state_bytes * 1e9 for turn in some)),
            f"ratio_to_{base}": asdict(paired(rate[kind], rate[base])),
        }
        for kind, some in turns.items()
    }


def report(parts: Mapping[str, dict[str, dict[str, Any]]]) -> str:
    """Return a table of the figures of each part."""
    tables = []
    for part, kinds in parts.items():
        ratio = f"ratio_to_{BASES[part]}"
        rows = [
            [
                kind,
                f"{one['gb_per_s']['median']:.2f}",
                f"{one['rows_per_s']['median']:.0f}",
                f"{one['cpu_s_per_gb']['median']:.2f}",
                str(Spread(**one[ratio])),
            ]
            for kind, one in kinds.items()
        ]
        tables.append(markdown([part, "GB/s", "rows/s", "CPU s/GB", f"times {BASES[part]}"], rows))
    return "\n\n".join(tables)


def main() -> None:
    """Measure, print the tables, keep every turn if asked to."""
    parser = command_line("benchmarks.reader", __doc__, save="reader", rounds=ROUNDS)
    add = parser.add_argument
    add("--rows", type=positive, default=ROWS, help="rows of the dataset that is read")
    add("--export-rows", type=positive, default=EXPORT_ROWS, help="rows of the one exported")
    add("--dir", type=Path, help="where to write some 4 GB; the temporary folder if left out")
    options = parser.parse_args()
    sys.path.append(str(TRAINERS))
    torch.set_num_threads(1)
    read, written = Shape(options.rows), Shape(options.export_rows)
    shapes = {"warm": read, "cold": read, "export": written}
    with tempfile.TemporaryDirectory(prefix="quarry-reader-", dir=options.dir) as name:
        folder = Path(name)
        facts = machine_facts(folder)
        turns = read_rows(folder / "read", read, options.rounds, options.seed)
        turns["export"] = write_rows(folder / "write", written, options.rounds, options.seed)
    found = {part: figures(some, shapes[part], BASES[part]) for part, some in turns.items()}
    print(report(found))
    result = {
        "command": command("benchmarks.reader", options),
        "machine": facts | {"speculators": version("speculators")},
        "seed": options.seed,
        "shapes": {part: asdict(one) | {"state_bytes": one.state_bytes} for part, one in shapes.items()},
        "figures": found,
        "turns": {
            part: {kind: [asdict(turn) for turn in some] for kind, some in kinds.items()}
            for part, kinds in turns.items()
        },
    }
    keep(options.save, result)


if __name__ == "__main__":
    main()
