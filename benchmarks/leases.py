"""Workers on one database: units a second, how long a lease takes: `python -m benchmarks.leases`.

Jobs of units of four short samples on the tests' engine, which takes no time of its own: what is measured is
the store, and whatever the machine has no core for.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx2
from sqlalchemy import create_engine, text

from benchmarks.harness import command_line, positive
from service.store import units
from tests.support.fake_engine import FakeEngine
from tests.support.pg import running_postgres
from tests.support.service_process import QUARRY, ROOT, body_of, serving
from tests.support.tiny_model import random_target

FOLDER = "QUARRY_BENCH_LEASES"
JOBS, SAMPLES = 8, 200
TIMEOUT_S = 600.0

if FOLDER in os.environ:
    lease_unit = units.lease

    def timed(*args: Any, **options: Any) -> units.UnitLease | None:  # noqa: ANN401
        """Lease a unit, and note when and how long it took."""
        begin = time.monotonic()
        lease = lease_unit(*args, **options)
        if lease is not None:
            with Path(os.environ[FOLDER], str(os.getpid())).open("a") as file:
                file.write(f"{begin} {time.monotonic()}\n")
        return lease

    units.lease = timed


class TimedEngine(FakeEngine):
    """The tests' engine, whose worker notes its leases."""


def main() -> int:
    """Print one JSON object; the exit status is 1 if a job did not complete in time."""
    parser = command_line("benchmarks.leases", __doc__)
    parser.add_argument("--workers", type=positive, default=8)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quarry-leases-"))
    with ExitStack() as stack:
        url = f"sqlite:///{folder}/quarry.db"
        if options.database == "postgresql":
            url = stack.enter_context(stack.enter_context(running_postgres()).database())
        figures = measure(folder, url, options.workers)
    print(json.dumps({"workers": options.workers, "database": options.database} | figures))
    return int(figures["states"] != ["completed"])


def measure(folder: Path, url: str, workers: int) -> dict[str, Any]:
    """Let the workers capture all jobs; return the figures."""
    target = random_target(folder / "model", layers=4, hidden=64)
    (folder / "leases").mkdir()
    settings = {
        "QUARRY_ENGINE": "benchmarks.leases:TimedEngine",
        "QUARRY_DATABASE_URL": url,
        "QUARRY_UNIT_MAX_SAMPLES": "4",
        "QUARRY_POLL_S": "0.1",
        "QUARRY_MODEL_ROOTS": '["/"]',
        "PYTHONPATH": str(ROOT),
        FOLDER: str(folder / "leases"),
    }
    data_dir, most = folder / "data", 0
    with ExitStack() as stack:
        api = {name: value for name, value in settings.items() if name not in ("PYTHONPATH", FOLDER)}
        service = stack.enter_context(serving(data_dir, "--no-worker", **api))
        log = stack.enter_context((folder / "workers.log").open("w"))
        for _ in range(workers):
            command = [*QUARRY, "worker", "--data-dir", str(data_dir)]
            process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        with httpx2.Client(base_url=service.url, trust_env=False, timeout=60) as http:
            beating, begin = 0, time.monotonic()
            while beating < workers and time.monotonic() - begin < TIMEOUT_S:
                time.sleep(1)
                hosts = http.get("/workers").raise_for_status().json()["hosts"]
                beating = sum("capture" in worker["roles"] for host in hosts for worker in host["workers"])
            for number in range(JOBS):
                samples = [
                    {"id": str(row), "token_ids": [1, 2, 3 + number, row + 1]} for row in range(SAMPLES)
                ]
                body = body_of(target, source={"kind": "inline", "samples": samples})
                http.post("/extract", json=body).raise_for_status()
            states, begin = [""], time.monotonic()
            while states != ["completed"] and time.monotonic() - begin < TIMEOUT_S:
                time.sleep(1)
                most = max(most, connections(url))
                states = sorted({job["state"] for job in http.get("/jobs").json()["jobs"]})
    lines = [line.split() for file in (folder / "leases").iterdir() for line in file.read_text().splitlines()]
    spans = sorted((float(start), float(end)) for start, end in lines)
    took = [end - start for start, end in spans]
    return {
        "states": states,
        "units": len(spans),
        "units_s": round(len(spans) / (spans[-1][1] - spans[0][0]), 1),
        "p50_ms": round(median(took) * 1e3, 1),
        "p99_ms": round(quantiles(took, n=100)[98] * 1e3, 1),
        "connections": most,
        "load": round(os.getloadavg()[0], 1),
    }


def connections(url: str) -> int:
    """Return how many connections PostgreSQL's clients hold now; 0 on SQLite, which has none."""
    if url.startswith("sqlite"):
        return 0
    engine = create_engine(url)
    with engine.connect() as connection:
        count = connection.scalar(
            text("select count(*) from pg_stat_activity where backend_type = 'client backend'")
        )
    engine.dispose()
    return int(count or 0) - 1


if __name__ == "__main__":
    sys.exit(main())
