"""Runs Quarry's connector inside vLLM on a CUDA GPU: are the states right, and what do they cost?

Needs a machine with a CUDA GPU and vLLM, nothing from the network. `python -m benchmarks.gpu_engine --help`.

Every case is a process of its own: an engine that dies takes no other figure with it.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_engine.cases import CASES
from benchmarks.gpu_engine.parity import measure
from benchmarks.gpu_engine.speed import Plan, measure_speed
from benchmarks.machine import machine_facts

RESULTS = Path(__file__).parents[1] / "results"

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Without it Triton multiplies float32 as TF32, whose error would hide ours.
    "TRITON_F32_DEFAULT": "ieee",
}
SPEED = "speed"
LOG_TAIL_LINES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases, print and keep their figures; 1 if one of them failed."""
    options = parsed(arguments)
    os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.case is not None:
        folder = options.folder / options.case
        folder.mkdir()
        (folder / "figures.json").write_text(json.dumps(asyncio.run(run_case(options, folder)), indent=1))
        return 0
    chosen = options.only or [*CASES, SPEED]
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="run-") as scratch,
        tempfile.TemporaryDirectory(dir=options.ram, prefix="quarry-") as ram,
    ):
        run = Run(options, Path(scratch), Path(ram))
        parity = [name for name in chosen if name in CASES]
        with ThreadPoolExecutor(options.jobs) as pool:
            figures = dict(zip(parity, pool.map(run.case, parity), strict=True))
        if SPEED in chosen:
            figures[SPEED] = run.case(SPEED)
    environment = {name: os.environ[name] for name in ENVIRONMENT}
    result = {"machine": machine_facts(options.folder) | gpu_facts(), "environment": environment, **figures}
    text = json.dumps(result, indent=1)
    print(text)
    if options.save is not None:
        (RESULTS / f"{options.save}.json").write_text(text + "\n")
    return int(any("failed" in figure for figure in figures.values()))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; `--case` is what a child process is told."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_engine", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*CASES, SPEED], help="run these cases alone")
    parser.add_argument(
        "--folder", type=Path, default=Path(".cache/gpu-engine"), help="on the disk to measure"
    )
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a folder in memory, for speed")
    parser.add_argument("--jobs", type=int, default=1, help="parity cases at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the speed run")
    parser.add_argument("--prompts", type=int, default=512, help="prompts a round of the speed run")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="how long one case may take")
    parser.add_argument("--tiny", action="store_true", help="tiny targets, to try the commands out")
    parser.add_argument("--logs", type=Path, help="keep what the engines said in this folder")
    parser.add_argument("--save", help="keep the figures in benchmarks/results/NAME.json")
    parser.add_argument("--case", choices=[*CASES, SPEED], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


async def run_case(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run one case in this process."""
    if options.case == SPEED:
        plan = Plan(options.prompts, options.rounds, options.ram, tiny=options.tiny)
        return await measure_speed(plan, folder)
    return await measure(CASES[options.case], folder, tiny=options.tiny)


@dataclass(frozen=True, slots=True)
class Run:
    """Starts one process a case. Both folders are the caller's to delete, whatever a process left."""

    options: argparse.Namespace
    scratch: Path
    ram: Path

    def case(self, name: str) -> dict[str, object]:
        """Run one case; of one that fails, return the end of its log."""
        options = self.options
        command = [sys.executable, "-m", "benchmarks.gpu_engine", "--case", name]
        command += ["--folder", str(self.scratch), "--ram", str(self.ram)]
        command += ["--rounds", str(options.rounds), "--prompts", str(options.prompts)]
        command += ["--tiny"] if options.tiny else []
        logs = options.logs or self.scratch
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status: int | str = process.wait(options.timeout_s)
            except subprocess.TimeoutExpired:
                status = f"none within {options.timeout_s:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        print(f"{name}: exit status {status}", file=sys.stderr, flush=True)
        if status != 0:
            return {"failed": log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]}
        figures: dict[str, object] = json.loads((self.scratch / name / "figures.json").read_text())
        return figures


def gpu_facts() -> dict[str, str | int]:
    """Return what torch says of the GPU."""
    if not torch.cuda.is_available():
        return {"gpu": "none"}
    facts = torch.cuda.get_device_properties(0)
    return {
        "gpu": facts.name,
        "gpu_memory_gb": round(facts.total_memory / 1e9),
        "cuda": str(torch.version.cuda),
    }


if __name__ == "__main__":
    sys.exit(main())
