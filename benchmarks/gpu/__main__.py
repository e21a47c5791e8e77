"""Quarry on a CUDA GPU: are the bytes right, and what does the GPU pay for them?

Every part is a process of its own: one that dies takes no other's figures with it. What it found is saved as
soon as it ends.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.check import check_bytes
from benchmarks.gpu.drain import measure_drain
from benchmarks.harness import command, command_line, positive, say
from benchmarks.machine import machine_facts

MODULE = "benchmarks.gpu"
PARTS = ("bytes", "drain", *CASES, "speed")
PARITY = "parity"
"""All cases of it."""
ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Without it Triton multiplies float32 as TF32, whose error would hide ours.
    "TRITON_F32_DEFAULT": "ieee",
}
ROUNDS = 5
LOG_TAIL_LINES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts and keep their figures; return 1 if one of them failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parsed(given)
    if options.child is not None:
        options.save.write_text(json.dumps(run_part(options.child, options)))
        return 0
    # Without this, the process of a part would outlive an end by signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parts = parts_of(options.parts)
    has_gpu = torch.cuda.is_available()
    if "bytes" in parts and not has_gpu:
        say("the parts bytes and drain need a CUDA device")
        return 2
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for folder in (options.save.parent, options.folder):
        folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, object] = {
        "command": command(MODULE, options),
        "machine": machine_facts(options.folder) | (gpu_facts() if has_gpu else {}),
        "environment": {name: os.environ[name] for name in ENVIRONMENT},
    }
    failed = False
    for part in parts:
        figures = run_process(part, given, options)
        result[part] = figures
        options.save.write_text(json.dumps(result, indent=1) + "\n")
        failed |= "failed" in figures
        if part == "bytes" and failed:
            break
    return int(failed)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `--child` is what a part's process is given."""
    parser = command_line(MODULE, __doc__, rounds=ROUNDS)
    add = parser.add_argument
    add("--parts", nargs="+", choices=(*PARTS, PARITY), default=PARTS, help="what to run (default: all)")
    add("--cache-gib", type=positive, default=24, help="size of the drain's paged cache (default: 24)")
    add("--folder", type=Path, default=Path(".cache/gpu"), help="where engines write: its disk is measured")
    add("--tiny", action="store_true", help="tiny targets of engines, to try the commands out")
    add("--timeout-s", type=float, default=1800.0, help="how long a part may take")
    add("--save", type=Path, metavar="FILE", default=Path(".cache/gpu/gpu.json"), help="keeps every round")
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def parts_of(chosen: Sequence[str]) -> list[str]:
    """Return the parts to run, in order: no drain is measured whose bytes were not checked."""
    wanted = set(chosen)
    if "drain" in chosen:
        wanted.add("bytes")
    if PARITY in chosen:
        wanted.update(CASES)
    return [part for part in PARTS if part in wanted]


def run_part(part: str, options: argparse.Namespace) -> dict[str, object]:
    """Run a part in this process."""
    if part == "bytes":
        return {"equal": check_bytes(options.cache_gib * 2**30, options.seed)}
    if part == "drain":
        return measure_drain(options.cache_gib * 2**30, options.seed, options.rounds)
    if part == "speed":
        from benchmarks.gpu.speed import measure_speed

        return measure_speed(options.folder, options.rounds, options.seed, tiny=options.tiny)
    from benchmarks.gpu.parity import measure_parity

    return measure_parity(part, options.folder, tiny=options.tiny)


def run_process(part: str, given: Sequence[str], options: argparse.Namespace) -> dict[str, object]:
    """Run a part in a process of its own and return its figures; of one that fails, the end of its log."""
    figures, log = (options.save.with_name(f"{part}.{ending}") for ending in ("json", "log"))
    order = [sys.executable, "-m", MODULE, *given, "--save", str(figures), "--child", part]
    with log.open("wb") as sink, tempfile.TemporaryDirectory(dir=options.folder, prefix="run-") as scratch:
        order += ["--folder", scratch]
        process = subprocess.Popen(order, stderr=sink, start_new_session=True)
        try:
            status: int | str = process.wait(options.timeout_s)
        except subprocess.TimeoutExpired:
            status = f"none within {options.timeout_s:.0f} s"
        finally:
            # An engine that outlives its part would hold the GPU's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    say(f"{part}: exit status {status}")
    if status != 0:
        return {"failed": log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]}
    found: dict[str, object] = json.loads(figures.read_text())
    return found


def gpu_facts() -> dict[str, str | int]:
    """Return what the driver says of the GPU."""
    names = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    keys = ("gpu", "gpu_memory_mib", "driver", "pcie_generation", "pcie_lanes")
    return {**dict(zip(keys, answer, strict=True)), "cuda": torch.version.cuda or "unknown"}


if __name__ == "__main__":
    sys.exit(main())
