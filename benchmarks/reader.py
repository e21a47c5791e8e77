"""The reader and the exporter against others on the same rows: `python -m benchmarks.reader --save`.

Reading: `QuarryDataset` against the speculators trainer's own `ArrowDataset` on an export of the same rows,
beside a plain read() of the shard; with all files in the page cache, and with none; one row after another,
and by two threads. Writing: `quarry export` beside a sealed copy of the shard. One process, every row of a
round in an order of its own, rows held until a batch is whole. The trainer's package is what `make test`
installs into `.cache/trainers`.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Spread, markdown, paired, shuffled_rounds, spread
from benchmarks.machine import machine_facts
from benchmarks.reader_dataset import Shape, write_dataset
from benchmarks.reader_turns import ExportBench, ReadBench, Turn, one_layer_share
from benchmarks.trainers import TRAINERS
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.run import export

RESULTS = Path(__file__).parent / "results" / "reader.json"
ROWS, EXPORT_ROWS, ROUNDS = 48, 32, 5

Turns = dict[str, list[Turn]]


def read_rows(folder: Path, shape: Shape, rounds: int, seed: int) -> dict[str, Any]:
    """Measure reading; return the turns of the warm and the cold rounds, and the share of one layer."""
    dataset, exported = folder / "dataset", folder / "exported"
    write_dataset(dataset, folder / "scratch", shape)
    export(str(dataset), exported, ExportOptions(FormatName.SPECULATORS, Algorithm.EAGLE3))
    bench = ReadBench(dataset, exported)
    found: dict[str, Any] = {"share_of_one_layer": one_layer_share(dataset)}
    draw = random.Random(seed)
    for name in ("warm", "cold"):

        def turn(kind: str, *, cold: bool = name == "cold") -> Turn:
            return bench.run(kind, draw.sample(range(len(bench)), len(bench)), cold=cold)

        found[name] = in_turns(bench.kinds(cold=name == "cold"), rounds, seed, turn)
    return found


def write_rows(folder: Path, shape: Shape, rounds: int, seed: int) -> Turns:
    """Measure the exports."""
    write_dataset(folder / "dataset", folder / "scratch", shape)
    bench = ExportBench(folder / "dataset", folder)
    return in_turns(list(bench.kinds), rounds, seed, bench.run)


def in_turns(kinds: Sequence[str], rounds: int, seed: int, run: Callable[[str], Turn]) -> Turns:
    """Run every kind once a round, after a round that does not count."""
    turns: Turns = {kind: [] for kind in kinds}
    for number, order in enumerate(shuffled_rounds(kinds, rounds + 1, seed)):
        for kind in order:
            turn = run(kind)
            if number:
                turns[kind].append(turn)
    return turns


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


def report(found: Mapping[str, dict[str, dict[str, Any]]], bases: Mapping[str, str]) -> str:
    """Return the tables of every part of `found`, by part."""
    parts = []
    for part, kinds in found.items():
        base = bases[part]
        header = [part, "GB/s", "rows/s", "CPU s/GB", f"times {base}"]
        rows = [
            [
                kind,
                f"{one['gb_per_s']['median']:.2f}",
                f"{one['rows_per_s']['median']:.0f}",
                f"{one['cpu_s_per_gb']['median']:.2f}",
                str(Spread(**one[f"ratio_to_{base}"])),
            ]
            for kind, one in kinds.items()
        ]
        parts.append(markdown(header, rows))
    return "\n\n".join(parts)


BASES = {"warm": "speculators", "cold": "speculators", "export": "copy"}


def measure(folder: Path, shape: Shape, written: Shape, rounds: int, seed: int) -> dict[str, Any]:
    """Measure everything below `folder`; return the machine, the figures and every turn."""
    facts = machine_facts(folder)
    torch.set_num_threads(1)
    read = read_rows(folder / "read", shape, rounds, seed)
    turns: dict[str, Turns] = {"warm": read["warm"], "cold": read["cold"]}
    turns["export"] = write_rows(folder / "write", written, rounds, seed)
    shapes = {"warm": shape, "cold": shape, "export": written}
    return {
        "machine": facts | {"speculators": version("speculators")},
        "seed": seed,
        "shapes": {part: asdict(one) | {"state_bytes": one.state_bytes} for part, one in shapes.items()},
        "share_of_one_layer": round(read["share_of_one_layer"], 5),
        "figures": {part: figures(some, shapes[part], BASES[part]) for part, some in turns.items()},
        "turns": {
            part: {kind: [asdict(turn) for turn in some] for kind, some in kinds.items()}
            for part, kinds in turns.items()
        },
    }


def main() -> None:
    """Measure, say it, and keep it if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reader", description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"keep the figures in {RESULTS.name}")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the dataset that is read")
    parser.add_argument("--export-rows", type=int, default=EXPORT_ROWS, help="rows of the one exported")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where to write some 4 GB; the temporary folder if left out")
    options = parser.parse_args()
    sys.path.append(str(TRAINERS))
    with tempfile.TemporaryDirectory(prefix="quarry-reader-", dir=options.dir) as folder:
        shapes = Shape(options.rows), Shape(options.export_rows)
        found = measure(Path(folder), *shapes, options.rounds, options.seed)
    layers = len(found["shapes"]["warm"]["layer_ids"])
    print(report(found["figures"], BASES))
    print(f"\nreading one of {layers} layers reads {found['share_of_one_layer']:.2%} of the shard's bytes")
    if options.save:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
