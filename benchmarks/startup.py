"""From `quarry extract` to the first captured states: `python -m benchmarks.startup --save`.

A round runs a small job once, from its file to the whole dataset, and vLLM alone, with the same model and
options, to its first answered token. The ratio of the two is what our part costs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import (
    ENVIRONMENT,
    command,
    command_line,
    keep,
    markdown,
    paired,
    run_rounds,
    set_environment,
    shuffled_rounds,
    spread,
)
from benchmarks.machine import machine_facts
from examples.tiny_target import CONVERSATIONS, Recipe
from tests.support.tiny_model import random_target

RECIPE = {"layers": 12, "hidden": 512}
SAMPLES, MAX_TOKENS = 8, 255
TURN_TIMEOUT_S = 600.0
LOG_TAIL_CHARS = 3000

QUARRY, BARE = "quarry extract", "vLLM alone"
JUDGED = {QUARRY: "the first states are captured", BARE: "the first answer"}
SETTINGS = {
    QUARRY: {
        "QUARRY_ENGINE": "benchmarks.startup_engine:NotedEngine",
        "QUARRY_ENGINE_OPTIONS": json.dumps({"enforce_eager": True}),
        "QUARRY_CPU_KV_CACHE_GIB": ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"],
    },
    BARE: {"VLLM_PLUGINS": ""},  # none of our plug-in, either
}


class Rows:
    """Runs one row once, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        """Write the target and the job into `folder`."""
        self._folder = folder
        target = str(random_target(folder / "target", **RECIPE))
        samples, job = folder / "samples.jsonl", folder / "job.json"
        samples.write_text("\n".join(CONVERSATIONS.read_text().splitlines()[:SAMPLES]))
        source = {"kind": "file", "path": str(samples)}
        limits = {"max_tokens": MAX_TOKENS, "on_too_long": "truncate", "loss": "all"}
        job.write_text(json.dumps({"model": target, "source": source, **limits}))
        bare = {
            "model": target,
            "dtype": Recipe().dtype,
            "max_model_len": MAX_TOKENS + 1,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "enforce_eager": True,
        }
        self._commands = {
            QUARRY: ["service.cli", "extract", str(job), "--out"],
            BARE: ["benchmarks.startup_bare", json.dumps(bare)],
        }

    def run(self, row: str, number: int) -> float:
        """Return the seconds to the row's judged stage. Raises RuntimeError with the end of its output."""
        folder = self._folder / f"{row.split()[0]}-{number}"
        folder.mkdir()
        out = [str(folder / "out")] if row == QUARRY else []
        noted, log = folder / "noted", folder / "log"
        begin = time.time()
        with log.open("wb") as sink:
            status = subprocess.run(
                [sys.executable, "-m", *self._commands[row], *out],
                env=os.environ | SETTINGS[row] | {"QUARRY_STARTUP_FILE": str(noted)},
                stdout=sink,
                stderr=sink,
                timeout=TURN_TIMEOUT_S,
                check=False,
            ).returncode
        if status:
            tail = log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
            raise RuntimeError(f"{row!r} ended with {status}:\n{tail}")
        return float(noted.read_text()) - begin


def table(rounds: Mapping[str, Sequence[float]]) -> str:
    """Return the seconds of each row, and their ratio to vLLM's in the same round."""
    rows = [
        [f"{row}: {JUDGED[row]}", str(spread(seconds)), str(paired(seconds, rounds[BARE]))]
        for row, seconds in rounds.items()
    ]
    return markdown(["from the start to", "seconds", "/ vLLM alone"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep the figures if asked to; return the exit status."""
    options = command_line("benchmarks.startup", __doc__, save="startup", rounds=5).parse_args(arguments)
    set_environment()
    with tempfile.TemporaryDirectory(prefix="quarry-startup-") as folder:
        facts = machine_facts(Path(folder))
        orders = shuffled_rounds(list(JUDGED), options.rounds, options.seed)
        rounds = run_rounds(list(JUDGED), orders, Rows(Path(folder)).run)
    print(table(rounds))
    kept = {
        "command": command("benchmarks.startup", options),
        "machine": facts,
        "target": RECIPE,
        "orders": orders,
        "rounds": {row: [{JUDGED[row]: one} for one in seconds] for row, seconds in rounds.items()},
        "summary": {
            row: {
                "stages_s": {JUDGED[row]: asdict(spread(seconds))},
                "ratio": asdict(paired(seconds, rounds[BARE])),
            }
            for row, seconds in rounds.items()
        },
    }
    keep(options.save, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
