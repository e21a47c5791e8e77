"""Does it cost more to answer all turns than to answer last turns? `python -m benchmarks.turns`.

One `quarry serve` runs jobs on vLLM, in turns which goes first. `all` lets the target answer every turn of
each conversation. `last` has the same conversations cut behind each of their user turns, of which it answers
the last, so that both answer as many turns with as many tokens. `a row a turn` is `all` with a template that
trims answers. The rate is of answered tokens, from the job's submission to its last captured unit.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.harness import command, command_line, keep, markdown, paired, positive, say, set_environment
from benchmarks.machine import machine_facts
from tests.support import templates
from tests.support.service_process import serving
from tests.support.tiny_model import random_target

ROWS = ("all", "last", "a row a turn")
ANSWER, TURNS = 48, 3
QUESTION = "What is in the module, and why was it put there by those who wrote it? "
POLL_S = 0.05


def conversation(name: str, turns: int) -> dict[str, Any]:
    """Return one of so many user turns, with answers of the source between them."""
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"{name}, {turn}: {QUESTION * 3}"}]
        messages += [{"role": "assistant", "content": f"{turn}: It says so itself. " * 4}]
    return {"id": f"{name}-{turns}", "messages": messages}


def body(row: str, target: Path, name: str, count: int) -> dict[str, Any]:
    """Return the job of a row; no two jobs share a prefix."""
    names = [f"{name} {number}" for number in range(count)]
    lengths = range(1, TURNS + 1) if row == "last" else (TURNS,)
    samples = [conversation(one, turns) for one in names for turns in lengths]
    return {
        "model": str(target),
        "source": {"kind": "inline", "samples": samples},
        "generate": {"turns": "last" if row == "last" else "all", "max_tokens": ANSWER},
        "storage": {"shard_bytes": 2**26},
        "canary": "skip",
    } | ({"chat_template": templates.LLAMA3.replace("<|eot_id|>", "<|im_end|>")} if row == ROWS[2] else {})


def run_job(url: str, asked: dict[str, Any]) -> dict[str, float]:
    """Run a job until it is captured; return answered tokens a second, and the bytes of its states."""
    begun = time.monotonic()
    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as http:
        job_id = http.post("/extract", json=asked).raise_for_status().json()["id"]
        job: dict[str, Any] = {"state": "queued"}
        captured_s = 0.0
        while job["state"] != "completed":
            job = http.get(f"/jobs/{job_id}").raise_for_status().json()
            progress = job["progress"]
            if progress["plan_done"] and progress["units_done"] == progress["units_planned"]:
                captured_s = captured_s or time.monotonic() - begun
            if job["state"] in ("failed", "blocked", "cancelled"):
                raise RuntimeError(f"the job is {job['state']}: {job['problem']}")
            time.sleep(POLL_S)
        units = http.get(f"/jobs/{job_id}/units").raise_for_status().json()["units"]
        manifest = json.loads(
            http.get(f"/jobs/{job_id}/files/manifests/{job_id}.json").raise_for_status().content
        )
    totals = manifest["totals"]
    say(f"{len(units)} units, {totals}, {manifest['checks'].get('answers')}")
    return {"tokens_s": totals["supervised_tokens"] / captured_s, "bytes": totals["bytes"]}


def measure(folder: Path, options: Any) -> dict[str, list[dict[str, float]]]:  # noqa: ANN401 - argparse's
    """Run a round that does not count, then `options.rounds` of them; return the rest by row."""
    target = random_target(
        folder / "models" / "target",
        hidden=options.hidden,
        dtype="float32",
        max_position=1024,
        chat_template=templates.CHATML,
    )
    turns: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
    settings = {"QUARRY_ENGINE": "service.capture.vllm_engine:VllmEngine"}
    settings |= {"QUARRY_MODEL_ROOTS": json.dumps([str(target.parent)])}
    with serving(folder / "data", **settings) as service:
        for turn in range(options.rounds + 1):
            for row in ROWS if turn % 2 else ROWS[::-1]:
                figures = run_job(service.url, body(row, target, f"{row} {turn}", options.conversations))
                say(f"round {turn}, {row}: {figures}")
                turns[row] += [figures] if turn else []
    return turns


def main() -> int:
    """Measure, print the table, keep the figures if asked to; return the exit status."""
    parser = command_line("benchmarks.turns", __doc__, save="turns", rounds=4)
    parser.add_argument("--conversations", type=positive, default=32, help="of each job")
    parser.add_argument("--hidden", type=positive, default=256, help="of the target")
    options = parser.parse_args()
    set_environment()
    with tempfile.TemporaryDirectory(prefix="quarry-turns-") as folder:
        facts = machine_facts(Path(folder))
        turns = measure(Path(folder), options)
    rates = {row: [turn["tokens_s"] for turn in turns[row]] for row in ROWS}
    sizes = {row: [turn["bytes"] for turn in turns[row]] for row in ROWS}
    lines = [
        [row, f"{sum(rates[row]) / len(rates[row]):.0f}"]
        + [str(paired(each[row], each["last"])) for each in (rates, sizes)]
        for row in ROWS
    ]
    print(markdown(["turns", "answered tokens/s", "against `last`", "bytes against `last`"], lines))
    kept = {"command": command("benchmarks.turns", options), "machine": facts, "load": os.getloadavg()[0]}
    keep(options.save, kept | {"turns": turns})
    return 0


if __name__ == "__main__":
    sys.exit(main())
