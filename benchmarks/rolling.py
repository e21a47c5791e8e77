"""Is capture as fast while shards leave, and how long do the last take? `python -m benchmarks.rolling`.

One `quarry serve` runs pairs of jobs on vLLM, in turns which goes first: one keeps its shards, one has them
stored in a repository and removed as it goes. Its rate is that of the tokens between the first unit that was
captured and the last. `--mb-per-s` slows the way to the repository, a stand-in in a process of its own.
`--engine tests` takes the tests' engine, whose states are there at once: shards then come faster than they
leave, and the time from the last captured unit to the end of the job is that of what the budget holds.
"""

import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.harness import command, command_line, keep, markdown, paired, positive, say, set_environment
from benchmarks.machine import machine_facts
from benchmarks.weights import write_target
from benchmarks.workload import KINDS, TARGETS
from schemas.identity import DTYPE_BYTES
from tests.support.desk import REPO, TOKEN
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token
from tests.support.hub_storage import LfsStorage
from tests.support.service_process import serving

KIND = KINDS["typical"]
ENGINES = {
    "vllm": ("service.capture.vllm_engine:VllmEngine", TARGETS["compute"]),
    "tests": ("tests.support.fake_engine:FakeEngine", TARGETS["drain"]),
}
ROWS = ("kept", "leaving")
UNITS, BUDGET_UNITS = 32, 24
POLL_S, TIMEOUT_S = 0.1, 1800.0


class SlowStorage(LfsStorage):
    """LFS objects that come over one line of `bytes_per_s`, or as fast as they can, and are not kept."""

    def __init__(self, bytes_per_s: float | None) -> None:
        super().__init__()
        self.keeps_bytes, self._bytes_per_s = False, bytes_per_s
        self._line = asyncio.Lock()

    async def _put(self, request: Request) -> Response:
        if self._bytes_per_s is not None:
            async with self._line:
                await asyncio.sleep(int(request.headers["content-length"]) / self._bytes_per_s)
        return await super()._put(request)


def run_hub(pipe: Connection, bytes_per_s: float | None) -> None:
    """Be the Hub until the other end says so; send the address first."""
    with FakeHub(lfs=SlowStorage(bytes_per_s)) as hub:
        hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        pipe.send(hub.url)
        pipe.recv()


def run_job(url: str, body: dict[str, Any]) -> dict[str, float]:
    """Run a job to its end; return tokens a second, seconds after its last unit, and those of waiting."""
    http = httpx2.Client(base_url=url, trust_env=False, timeout=60)
    answer = http.post("/extract", json=body)
    if answer.is_error:
        raise RuntimeError(answer.text)
    job_id = answer.json()["id"]
    begun, seen, waited_s = time.monotonic(), [(0.0, 0)], 0.0
    while True:
        job = http.get(f"/jobs/{job_id}").raise_for_status().json()
        now, written = time.monotonic(), job["progress"]["tokens_written"]
        if written > seen[-1][1]:
            seen.append((now, written))
        if job["state"] == "completed":
            break
        if job["state"] in ("failed", "blocked", "cancelled") or now - begun > TIMEOUT_S:
            raise RuntimeError(f"the job is {job['state']}: {job['problem']}")
        time.sleep(POLL_S)
        waited_s += (time.monotonic() - now) * bool(job["waits"])
    (first_s, first), (last_s, last) = seen[1], seen[-1]
    return {"tokens_s": (last - first) / (last_s - first_s), "tail_s": now - last_s, "waited_s": waited_s}


def measure(folder: Path, options: Any) -> dict[str, list[dict[str, float]]]:  # noqa: ANN401 - argparse's
    """Run a pair of jobs that does not count, then `options.rounds` of them; return the rest by row."""
    engine, target = ENGINES[options.engine]
    model = folder / "models" / "target"
    write_target(target, model, KIND.longest)
    # `state_bytes_per_token` is of the target's own bfloat16.
    wider = DTYPE_BYTES[options.dtype] // 2
    shard_bytes = options.samples * KIND.mean_tokens * target.state_bytes_per_token * wider // UNITS
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    rate = None if options.mb_per_s is None else options.mb_per_s * 1e6
    hub = context.Process(target=run_hub, args=(theirs, rate), daemon=True)
    hub.start()
    turns: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
    settings = {
        "QUARRY_ENGINE": engine,
        "QUARRY_HUB_ENDPOINT": pipe.recv(),
        "QUARRY_HUB_TOKEN": TOKEN,
        "QUARRY_SOURCE_ROOTS": json.dumps([str(model.parent)]),
        "QUARRY_SCRATCH_BYTES": str(BUDGET_UNITS * shard_bytes),
        "HF_HOME": str(folder / "hub-cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    with serving(folder / "data", **settings) as service:
        for turn in range(options.rounds + 1):
            for row in ROWS if turn % 2 else ROWS[::-1]:
                source = model.parent / f"{row}-{turn}.jsonl"
                write_samples(source, options.samples, target.vocab_size)
                body = {
                    "model": str(model),
                    "dtype": options.dtype,
                    "layers": list(target.layer_ids),
                    "source": {"kind": "file", "path": str(source)},
                    "storage": {"shard_bytes": shard_bytes, "keep_local": row == "kept"},
                    "canary": "skip",
                } | ({} if row == "kept" else {"hub": {"repo_id": REPO}})
                figures = run_job(service.url, body)
                say(f"round {turn}, {row}: {figures}")
                turns[row] += [figures] if turn else []
    pipe.send(None)
    hub.join()
    return turns


def write_samples(path: Path, count: int, vocab_size: int) -> None:
    """Write samples of random token ids, drawn by the file's name: no two jobs share a prefix."""
    draw = random.Random(path.name)
    with path.open("w") as file:
        for number in range(count):
            ids = draw.choices(range(vocab_size), k=draw.randint(KIND.shortest, KIND.longest))
            file.write(json.dumps({"id": str(number), "token_ids": ids}) + "\n")


def main() -> int:
    """Measure, print the table, keep the figures if asked to; return the exit status."""
    parser = command_line("benchmarks.rolling", __doc__, save="rolling", rounds=5)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--samples", type=positive, default=128, help="of each job")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16")
    parser.add_argument("--mb-per-s", type=positive, help="what the way to the repository carries")
    options = parser.parse_args()
    set_environment()
    with tempfile.TemporaryDirectory(prefix="quarry-rolling-") as folder:
        facts = machine_facts(Path(folder))
        turns = measure(Path(folder), options)
    rates = {row: [turn["tokens_s"] for turn in turns[row]] for row in ROWS}
    ratio = paired(rates["leaving"], rates["kept"])
    lines = [
        [row, f"{sum(rates[row]) / len(rates[row]):.0f}", " ".join(f"{t['tail_s']:.1f}" for t in turns[row])]
        for row in ROWS
    ]
    print(markdown(["shards", "tokens/s", "seconds from the last unit to the end"], lines))
    print(f"leaving / kept: {ratio}")
    kept = {"command": command("benchmarks.rolling", options), "machine": facts, "load": os.getloadavg()[0]}
    keep(options.save, kept | {"turns": turns})
    return 0


if __name__ == "__main__":
    sys.exit(main())
