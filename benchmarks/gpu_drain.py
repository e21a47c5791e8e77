"""The drain on a GPU: from paged blocks to host memory and files, against what the link carries.

`python -m benchmarks.gpu_drain` on a CUDA machine; see benchmarks/README.md. It needs torch, numpy and
psutil, and for the rows that end in files also pyarrow, pydantic, safetensors and xxhash; no vLLM. Before
anything is timed, copies are compared with the cache, bit for bit: this is the CUDA gather's test.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu_cache import HIDDEN_SIZE, NUM_LAYERS, NUM_SLOTS, random_cache
from benchmarks.gpu_check import check_everything
from benchmarks.gpu_report import base_of, figures, table
from benchmarks.gpu_rows import Cell, Rows
from benchmarks.gpu_turns import GpuTurn, Model
from benchmarks.gpu_ways import POOL_BYTES
from benchmarks.harness import shuffled_rounds
from benchmarks.machine import machine_facts
from connector.cuda_gather import STAGE_BYTES
from connector.pool import HostPool

RAM_DISK = Path("/dev/shm")
PARTS = ("drain", "stages", "files")
ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print the report, keep the figures if asked to; return the exit status."""
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    for folder in (options.dir, *([options.save.parent] if options.save else [])):
        folder.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(options.dir), **_gpu_facts()}
    said = {
        "command": _command(options),
        "machine": facts,
        "shape": {"layers": NUM_LAYERS, "hidden_size": HIDDEN_SIZE, "block_slots": NUM_SLOTS},
        "cache_gib": options.cache_gib,
        "pool_bytes": POOL_BYTES,
        "stage_bytes": STAGE_BYTES,
    }
    print(json.dumps(said, indent=1), flush=True)
    flat = random_cache(options.cache_gib * 2**30, options.seed)
    pool, model = HostPool(POOL_BYTES, pinned=True), Model()
    checked = check_everything(flat, pool, model)
    print(f"equal bit for bit, in bytes: {json.dumps(checked)}", flush=True)
    rows = Rows(flat, pool, options.seed)
    result: dict[str, object] = {**said, "equal_bytes": checked}
    with ExitStack() as scratch:
        folders = {
            "RAM disk": Path(scratch.enter_context(tempfile.TemporaryDirectory(dir=RAM_DISK))),
            "disk": Path(scratch.enter_context(tempfile.TemporaryDirectory(dir=options.dir))),
        }
        cells = {"drain": rows.drain(), "stages": rows.stages(), "files": rows.files(folders)}
        for part in options.parts:
            result[part] = _measure(cells[part], model, options)
            if options.save is not None:
                options.save.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _measure(
    cells: Iterable[tuple[str, Cell]], model: Model, options: argparse.Namespace
) -> dict[str, object]:
    """Run every cell: a turn of each row that does not count, then rounds, each in an order of its own."""
    kept: dict[str, object] = {}
    for name, cell in cells:
        turns: dict[str, list[GpuTurn]] = {row: [] for row in cell}
        orders = shuffled_rounds(list(cell), options.rounds, options.seed)
        for row in cell:
            cell[row].run(model)
        for order in orders:
            for row in order:
                turns[row].append(cell[row].run(model))
        of_cell = figures(turns)
        said = f"{name}; base: {base_of(turns)}; rounds: {options.rounds}"
        print(f"\n{said}\n\n{table(of_cell)}", flush=True)
        kept[name] = {
            "orders": orders,
            "rounds": {row: [asdict(turn) for turn in of_row] for row, of_row in turns.items()},
            "summary": {row: asdict(of_row) for row, of_row in of_cell.items()},
        }
    return kept


def _gpu_facts() -> dict[str, str | int]:
    """Return the device's facts; the driver's own tool tells what torch does not know."""
    asked = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    command = [
        "nvidia-smi",
        f"--query-gpu={asked}",
        "--format=csv,noheader",
        f"--id={torch.cuda.current_device()}",
    ]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    properties = torch.cuda.get_device_properties()
    return {
        "gpu": properties.name,
        "gpu_memory_gb": round(properties.total_memory / 1e9),
        "cuda": torch.version.cuda or "unknown",
        **dict(zip(("driver", "pcie_generation", "pcie_lanes"), told, strict=True)),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_drain",
        description="Measure the drain on a GPU; see benchmarks/README.md.",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=ROUNDS, help=f"rounds of every row (default: {ROUNDS})")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    add("--cache-gib", type=int, default=24, help="size of the paged cache (default: 24)")
    add("--seed", type=int, default=0, help="of the cache, the requests and the order within a round")
    add("--dir", type=Path, default=Path(".cache/bench"), help="where files are written beside the RAM disk")
    add("--save", type=Path, metavar="FILE", help="keep every round in FILE, as JSON")
    return parser.parse_args(arguments)


def _command(options: argparse.Namespace) -> str:
    """Return the command that measures the same again."""
    return (
        f"python -m benchmarks.gpu_drain --rounds {options.rounds} --parts {' '.join(options.parts)} "
        f"--cache-gib {options.cache_gib} --seed {options.seed}"
    )


if __name__ == "__main__":
    sys.exit(main())
