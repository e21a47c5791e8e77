"""Quarry on a CUDA GPU, in nine parts: are the rows right, and how fast are they?

Every part is a process of its own with a share of the command's time: one that dies or lasts too long takes
no other's figures with it. Two files come out: `gpu.json` with all figures, saved as they are known, and
`gpu.log`.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from benchmarks.gpu.figures import FigureFile
from benchmarks.gpu.parts import PARTS, in_order, run_part
from benchmarks.gpu.unpack import SITE
from benchmarks.harness import command_line, positive, say
from benchmarks.meter import tree

MODULE = "benchmarks.gpu"
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Without it Triton multiplies float32 as TF32, whose error would hide ours.
    "TRITON_F32_DEFAULT": "ieee",
    # Not carried to a bare machine; vLLM takes it for granted.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
LIMIT_S = 540.0
LEAST_S = 20.0
"""A part is not begun with less time left than this."""
KILL_S = 20.0
LOG_BYTES = 2**20
"""Of each log its end is kept."""
LOG_TAIL_LINES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts and keep their figures; return 1 if one of them failed or was not begun."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parsed(given)
    figures = FigureFile(options.out / "gpu.json")
    if options.child:
        run_part(options.parts[0], options, figures.save(options.parts[0]))
        return 0
    # Without this, the process of a part would outlive an end by signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline = time.monotonic() + options.limit_s
    for folder in (options.out, options.folder):
        folder.mkdir(parents=True, exist_ok=True)
    environment = part_environment(os.environ)
    figures.put(facts(options.folder), "machine")
    how = {name: value for name, value in vars(options).items() if isinstance(value, bool | int | float)}

    def run(part: str) -> bool:
        left_s = deadline - time.monotonic()
        began = time.monotonic()
        if left_s < LEAST_S:
            ending: dict[str, object] = {
                "failed": f"not begun: {left_s:.0f} s of {options.limit_s:.0f} are left"
            }
        else:
            figures.put({}, "parts", part)  # of an earlier run of it
            ending = run_process(part, given, options, environment, left_s)
        seconds = round(time.monotonic() - began, 1)
        for name, value in {**ending, "seconds": seconds, "options": how}.items():
            figures.put(value, "parts", part, name)
        say(f"{part}: {ending.get('failed', 'done')}")
        return "failed" not in ending

    parts = in_order(options.parts)
    with ThreadPoolExecutor(len(parts) if options.together else 1) as running:
        return int(not all(list(running.map(run, parts))))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `--child` is what a part's process is given."""
    parser = command_line(MODULE, __doc__, rounds=2)
    add = parser.add_argument
    add("parts", nargs="+", choices=PARTS, metavar="PART", help=f"one or more of {', '.join(PARTS)}")
    add("--out", type=Path, default=Path(".cache/gpu/out"), help="where gpu.json and gpu.log go")
    add("--folder", type=Path, default=Path(".cache/gpu"), help="where engines write: its disk is measured")
    add("--limit-s", type=float, default=LIMIT_S, help=f"for all parts together (default: {LIMIT_S:.0f})")
    add("--together", action="store_true", help="run the parts side by side: none that takes a rate")
    add("--only", nargs="+", metavar="NAME", help="of a part's cases, rows or jobs only these")
    add("--weights", type=Path, help="where the parts of rates keep their targets (default: the folder)")
    add("--round-tokens", type=positive, help="tokens of a row's turn in the parts of rates")
    add("--cache-gib", type=positive, default=24, help="size of the part bytes' paged cache (default: 24)")
    add("--eager", action="store_true", help="no compiled graphs where a part leaves the choice")
    add("--tiny", action="store_true", help="tiny targets, to try a part out on vLLM's CPU build")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def part_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a part: what was carried comes first on the path, then the repository."""
    paths = [str(SITE)] if SITE.exists() else []
    paths += [str(ROOT), *filter(None, [own.get("PYTHONPATH")])]
    return {**ENVIRONMENT, **own, "PYTHONPATH": os.pathsep.join(paths)}


def facts(folder: Path) -> dict[str, str | int | float]:
    """Return what figures are worth nothing without; engines write to `folder`."""
    import torch

    from benchmarks.machine import machine_facts

    return machine_facts(folder) | (gpu_facts() if torch.cuda.is_available() else {})


def run_process(
    part: str,
    given: Sequence[str],
    options: argparse.Namespace,
    environment: Mapping[str, str],
    limit_s: float,
) -> dict[str, object]:
    """Run a part in a process of its own; return how it ended: of one that fails, the end of its log."""
    others = set(options.parts) - {part}
    order = [sys.executable, "-m", MODULE, *(word for word in given if word not in others), "--child"]
    with tempfile.TemporaryDirectory(
        dir=options.folder, prefix="run-", ignore_cleanup_errors=True
    ) as scratch:
        log = Path(scratch, "log")
        with log.open("wb") as sink:
            process = subprocess.Popen(
                order, stdout=sink, stderr=sink, start_new_session=True, env=environment
            )
            try:
                status: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = f"none within {limit_s:.0f} s"
            finally:
                kill_tree(process)
        said = log.read_bytes()[-LOG_BYTES:]
    with options.out.joinpath("gpu.log").open("ab") as kept:
        kept.write(f"===== {part}\n".encode() + said + b"\n")
        # An engine's own log names the cause.
        for other in sorted((options.folder / part).rglob("*.log")) if status != 0 else ():
            kept.write(
                f"----- {other.relative_to(options.folder)}\n".encode() + other.read_bytes()[-LOG_BYTES:]
            )
    shutil.rmtree(options.folder / part, ignore_errors=True)
    if status == 0:
        return {}
    return {
        "failed": [f"exit status {status}", *said.decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]]
    }


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a part: an engine in a session of its own would hold the GPU's memory."""
    with contextlib.suppress(psutil.NoSuchProcess):
        left = tree(process.pid)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left[1:], timeout=KILL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def gpu_facts() -> dict[str, str | int]:
    """Return what the driver says of the GPU."""
    import torch

    names = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    keys = ("gpu", "gpu_memory_mib", "driver", "pcie_generation", "pcie_lanes")
    return {**dict(zip(keys, answer, strict=True)), "cuda": torch.version.cuda or "unknown"}


if __name__ == "__main__":
    sys.exit(main())
