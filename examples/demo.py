"""The whole way once: target, service, job, progress, verification, a row. Run it as `make demo`.

Everything is kept in `demo-out/`. The job's idempotency key is a function of the job and the target, so a
second run finds the same job complete and goes on to reading it.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from rich.markup import escape

from examples.local_service import (
    CONSOLE,
    OUT,
    QUARRY,
    TARGET,
    ExampleFailed,
    free_port,
    prepare_target,
    running_service,
)
from examples.show_row import show_dataset
from examples.tiny_target import ROOT
from schemas.job import JobState, JobSummary
from service.cli.progress_bar import progress_display
from service.client import ProblemReceived, Quarry

DATA = OUT / "data"
LOG = OUT / "service.log"
JOB_FILE = Path("examples/job.yaml")
SETTINGS = {"QUARRY_SOURCE_ROOTS": json.dumps([str(JOB_FILE.parent)])}

STOPPED = frozenset({JobState.BLOCKED, JobState.FAILED, JobState.CANCELLED})


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
    """Show the job's progress until it is complete. Raises ExampleFailed."""
    with Quarry(server) as quarry, progress_display(sys.stdout) as display:
        for job in quarry.follow(job_id):
            display.show(job)
    if job.state is not JobState.COMPLETED:
        why = job.problem.model_dump_json(indent=2) if job.problem else "it has no problem"
        raise ExampleFailed(f"job {job.id} did not complete: {why}")


def verify(dataset: Path) -> None:
    """Run `quarry verify` on the finished dataset, against the target's own weights."""
    CONSOLE.print(f"[bold]4. The proof[/]: quarry verify {dataset} --model {TARGET}")
    done = subprocess.run([str(QUARRY), "verify", str(dataset), "--model", str(TARGET)], check=False)
    if done.returncode != 0:
        raise ExampleFailed(f"quarry verify ended with exit code {done.returncode}")


def main() -> int:
    """Run the demo; return its exit code."""
    os.chdir(ROOT)
    OUT.mkdir(exist_ok=True)
    try:
        target = prepare_target()
        CONSOLE.print(f"[bold]2. The service[/]: quarry serve --data-dir {DATA} (its log: {LOG})")
        with running_service(DATA, LOG, SETTINGS, free_port()) as server:
            job = post_job(server, target)
            follow(server, job.id)
        dataset = DATA / "jobs" / job.id
        verify(dataset)
        show_dataset(dataset, job, TARGET, CONSOLE)
        CONSOLE.print("next: `make nights`, a dataset that grows while you watch it on the service's page")
    except KeyboardInterrupt:
        CONSOLE.print("stopped; `make demo` goes on from here")
        return 130
    except (ExampleFailed, ProblemReceived) as error:
        CONSOLE.print(f"[bold red]failed:[/] {escape(str(error))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
