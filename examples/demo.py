"""The whole way once: target, service, job, progress, verification, a row. Run it as `make demo`.

Everything is kept in `demo-out/`. The job's idempotency key is a function of the job and the target, so a
second run finds the same job complete and goes on to reading it.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.markup import escape

from examples.show_row import show_dataset
from examples.tiny_target import ROOT, Recipe, cached_target
from schemas.job import JobState, JobSummary
from service.cli.progress_bar import progress_display
from service.client import ProblemReceived, Quarry

OUT = Path("demo-out")  # relative paths keep the output short; `main` enters the repository's root
TARGET = OUT / "target"
DATA = OUT / "data"
LOG = OUT / "service.log"
JOB_FILE = Path("examples/job.yaml")
QUARRY = Path(sys.executable).with_name("quarry")

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
POLL_S = 0.2

STOPPED = frozenset({JobState.BLOCKED, JobState.FAILED, JobState.CANCELLED})

SETTINGS = {
    "QUARRY_MODEL_ROOTS": json.dumps([str(OUT)]),
    "QUARRY_SOURCE_ROOTS": json.dumps([str(JOB_FILE.parent)]),
    # Without these vLLM compiles for a minute and takes more memory for its cache than this model can use.
    "QUARRY_ENGINE_OPTIONS": json.dumps({"enforce_eager": True}),
    "QUARRY_CPU_KV_CACHE_GIB": "1",
}

CONSOLE = Console(soft_wrap=True)


class DemoFailed(Exception):
    """What went wrong, and where to look."""


def prepare_target() -> str:
    """Put the target where the job names it, and return the name of its recipe."""
    CONSOLE.print("[bold]1. The target[/]: a small Qwen3, trained for a minute at the first run")
    made = cached_target(Recipe())
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(made, TARGET)
    training = json.loads((TARGET / "training.json").read_text())
    before, after = training["loss_before"], training["loss_after"]
    CONSOLE.print(f"   {TARGET}: training took its loss from {before:.2f} to {after:.2f} nats a token")
    return made.name


@contextmanager
def running_service() -> Iterator[str]:
    """Start `quarry serve`, wait until it is ready, yield its base URL, and stop it. Raises DemoFailed."""
    CONSOLE.print(f"[bold]2. The service[/]: quarry serve --data-dir {DATA} (its log: {LOG})")
    port = free_port()
    server = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **SETTINGS, "QUARRY_PORT": str(port)}
    command = [str(QUARRY), "serve", "--data-dir", str(DATA)]
    with (
        LOG.open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as child,
    ):
        try:
            wait_until_ready(server, child)
            yield server
        finally:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
    if child.returncode != 0:
        raise DemoFailed(f"the service ended with exit code {child.returncode}: see {LOG}")


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def wait_until_ready(server: str, child: subprocess.Popen[bytes]) -> None:
    """Return when the service takes jobs."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while child.poll() is None and time.monotonic() < deadline:
        try:
            if httpx2.get(f"{server}/readyz", trust_env=False).is_success:
                return
        except httpx2.TransportError:
            pass  # it does not listen yet
        time.sleep(POLL_S)
    raise DemoFailed(f"the service did not become ready: see {LOG}")


def post_job(server: str, target: str) -> JobSummary:
    """Submit the job under a key that says what it is; a job that stopped is resumed."""
    body = {**yaml.safe_load(JOB_FILE.read_text()), "model": f"./{TARGET}"}
    key = "demo-" + hashlib.sha256(f"{target} {json.dumps(body, sort_keys=True)}".encode()).hexdigest()[:16]
    CONSOLE.print(f"[bold]3. The job[/]: POST /extract with Idempotency-Key {key}")
    with Quarry(server) as quarry:
        job = quarry.submit(body, key=key)
        if job.state in STOPPED:
            job = quarry.resume(job.id)
    CONSOLE.print(f"   {job.id} is {job.state}")
    return job


def follow(server: str, job_id: str) -> None:
    """Show the job's progress until it is complete. Raises DemoFailed."""
    with Quarry(server) as quarry, progress_display(sys.stdout) as display:
        for job in quarry.follow(job_id):
            display.show(job)
    if job.state is not JobState.COMPLETED:
        why = job.problem.model_dump_json(indent=2) if job.problem else "it has no problem"
        raise DemoFailed(f"job {job.id} did not complete: {why}")


def verify(dataset: Path) -> None:
    """Run `quarry verify` on the finished dataset, against the target's own weights."""
    CONSOLE.print(f"[bold]4. The proof[/]: quarry verify {dataset} --model {TARGET}")
    done = subprocess.run([str(QUARRY), "verify", str(dataset), "--model", str(TARGET)], check=False)
    if done.returncode != 0:
        raise DemoFailed(f"quarry verify ended with exit code {done.returncode}")


def main() -> int:
    """Run the demo; return its exit code."""
    os.chdir(ROOT)
    OUT.mkdir(exist_ok=True)
    try:
        target = prepare_target()
        with running_service() as server:
            job = post_job(server, target)
            follow(server, job.id)
        dataset = DATA / "jobs" / job.id
        verify(dataset)
        show_dataset(dataset, job, TARGET, CONSOLE)
    except (DemoFailed, ProblemReceived) as error:
        CONSOLE.print(f"[bold red]failed:[/] {escape(str(error))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
