"""A dataset that grows each night, with a night a minute: `make nights`, and watch it on the page.

A Hub of this machine, which forgets everything at the end, stands in for the real one. Each night brings new
conversations into a folder, and a schedule captures and pushes them. It ends after ten nights or with Ctrl-C,
and then reads the dataset from the Hub. The rest is kept in `demo-out/nights/` until the next start.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

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
from examples.tiny_target import CONVERSATIONS, ROOT
from schemas.job import JobState, JobSummary
from service.client import ProblemReceived, Quarry
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token

NIGHTS = OUT / "nights"
SOURCE = NIGHTS / "conversations"
LOG = NIGHTS / "service.log"
PORT = 8642
"""Where the guides have the service; another is taken if this one is in use."""
NAME, REPO, TOKEN = "nightly", "my-org/nights", "hf_of_this_machine"
EACH_NIGHT, MOST_NIGHTS = 20, 10
POLL_S = 1.0

READER = f"""
from service.reader import Eagle3, QuarryDataset
rows = QuarryDataset("hf://datasets/{REPO}", view=Eagle3())
shapes = {{name: list(tensor.shape) for name, tensor in rows[0].items()}}
print(f"   {{len(rows)}} rows on the Hub; the first has {{shapes}}")
"""

SCHEDULE = {
    "name": NAME,
    "cron": "* * * * *",
    "samples": "new",
    "overlap": "queue",
    "request": {
        "model": f"./{TARGET}",
        "layers": "eagle3",
        "source": {"kind": "file", "path": str(ROOT / SOURCE)},
        "hub": {"repo_id": REPO},
    },
}


def bring(night: int, rows: Sequence[str]) -> None:
    """Put a night's conversations into the folder in one piece: a hidden file is not read."""
    hidden = SOURCE / f".{night}"
    hidden.write_text("".join(rows))
    hidden.rename(SOURCE / f"night-{night:02}.jsonl")


def next_run(quarry: Quarry, known: set[str]) -> str:
    """Wait for a slot whose job is not among the known ones, which it joins; return the job's id."""
    while True:
        for run in quarry.runs(NAME):
            if run.job_id is not None and run.job_id not in known:
                known.add(run.job_id)
                return run.job_id
        time.sleep(POLL_S)


def ended(quarry: Quarry, job_id: str) -> JobSummary:
    """Wait for a job's end. Raises ExampleFailed where it is not complete."""
    *_, job = quarry.follow(job_id)
    if job.state is not JobState.COMPLETED:
        raise ExampleFailed(f"job {job.id} is {job.state}: see {LOG} and 'quarry jobs show {job.id}'")
    return job


def night_with_samples(quarry: Quarry, known: set[str]) -> JobSummary:
    """Wait for a job that found new samples, and for its end.

    A slot that waited for the night before it may plan before this night's conversations are there: it is not
    this night's.
    """
    while True:
        job = ended(quarry, next_run(quarry, known))
        if job.progress.samples_written:
            return job


def pass_nights(quarry: Quarry, hub: FakeHub, nights: int) -> None:
    """Let nights pass; the first one is run at once, the others at their minute."""
    known: set[str] = set()
    quarry.add_schedule(SCHEDULE)
    lines = CONVERSATIONS.read_text().splitlines(keepends=True)
    for night in range(1, nights + 1):
        bring(night, lines[(night - 1) * EACH_NIGHT : night * EACH_NIGHT])
        if night == 1:
            quarry.run_schedule(NAME)
        job = night_with_samples(quarry, known)
        done = job.progress
        commits = len(hub.repo(REPO).commits) - 1
        many = "s" * (commits > 1)
        samples = f"{done.samples_written} new samples, {done.tokens_written:,} tokens"
        CONSOLE.print(f"   night {night}: {job.id} wrote {samples}; {REPO} has {commits} commit{many}")


def read_back(hub: FakeHub) -> None:
    """Read the dataset from the Hub in a process of its own, as a trainer does. Raises ExampleFailed."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(NIGHTS / "hf-home")}
    done = subprocess.run([sys.executable, "-c", READER], env=environment, check=False)
    if done.returncode != 0:
        raise ExampleFailed("the dataset cannot be read from the Hub")


def main() -> int:
    """Pass some nights; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=MOST_NIGHTS, choices=range(1, MOST_NIGHTS + 1))
    nights = parser.parse_args().nights
    os.chdir(ROOT)
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # the Hub of this machine keeps whole files
    OUT.mkdir(exist_ok=True)
    lock = (OUT / "nights.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        CONSOLE.print(f"[bold red]failed:[/] another 'make nights' runs on {NIGHTS}: end it with Ctrl-C")
        return 1
    shutil.rmtree(NIGHTS, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    try:
        prepare_target()
        with FakeHub() as hub:
            hub.add_token(TOKEN, Token("me", orgs={"my-org": "write"}))
            watch(hub, nights)
    except (ExampleFailed, ProblemReceived) as error:
        CONSOLE.print(f"[bold red]failed:[/] {escape(str(error))}")
        return 1
    return 0


def watch(hub: FakeHub, nights: int) -> None:
    """Run the service beside its Hub until the nights are over or a person has seen enough."""
    CONSOLE.print(f"[bold]2. A Hub of this machine[/]: HF_ENDPOINT={hub.url} HF_TOKEN={TOKEN} reads {REPO}")
    with running_service(NIGHTS / "data", LOG, settings(hub), free_port(PORT)) as server:
        CONSOLE.print(f"[bold]3. The service[/]: watch it at {server}/ui/schedules/{NAME} (its log: {LOG})")
        CONSOLE.print(f"   or with: {QUARRY} schedules show {NAME} --server {server}")
        CONSOLE.print(
            "[bold]4. The nights[/]: one a minute, the first while the engine starts; Ctrl-C ends them"
        )
        with suppress(KeyboardInterrupt), Quarry(server) as quarry:
            pass_nights(quarry, hub, nights)
        CONSOLE.print("   the service ends, which takes some seconds")
    CONSOLE.print(f"[bold]5. The dataset[/]: QuarryDataset('hf://datasets/{REPO}', view=Eagle3())")
    read_back(hub)
    CONSOLE.print(
        f"   the Hub is gone now; the jobs' folders are in {NIGHTS / 'data' / 'jobs'} until the next start"
    )


def settings(hub: FakeHub) -> Mapping[str, str]:
    """Return the service's settings: where it pushes, and which folder its jobs may read."""
    return {
        "QUARRY_HUB_ENDPOINT": hub.url,
        "QUARRY_HUB_TOKEN": TOKEN,
        "QUARRY_SOURCE_ROOTS": json.dumps([str(SOURCE)]),
    }


if __name__ == "__main__":
    sys.exit(main())
