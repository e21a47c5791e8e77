"""`quarry jobs`: the jobs of a running service."""

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import islice
from typing import Annotated

import typer
from rich.filesize import decimal

from schemas.job import JobState, JobSummary
from schemas.names import is_job_id
from service.cli.console import (
    EXIT_BLOCKED,
    EXIT_NOT_COMPLETE,
    AsJson,
    complain,
    group,
    say,
    show_document,
    show_facts,
    show_json,
    show_list,
    show_table,
)
from service.cli.files import JobFile
from service.cli.server import SERVER, Quarry

app = group("jobs", "Submit, list, follow, pause, cancel, resume and delete the jobs of a running service.")


def _checked_id(value: str) -> str:
    if not is_job_id(value):
        raise typer.BadParameter("a job id is 'j-' and 16 hex digits")
    return value


JobIdArgument = Annotated[str, typer.Argument(metavar="ID", callback=_checked_id)]
HEADS = ("id", "state", "progress", "created", "model", "waits")


@app.command()
def submit(
    file: JobFile,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: submitting with it again gives the same job.")
    ] = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Priority of the job.")] = 0,
    follow: Annotated[bool, typer.Option("--watch", help="Follow the job as 'watch' does.")] = False,
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Submit a job. Its paths are on the service's host; a model './...' is relative to the file."""
    from service.cli.job_file import read_job_file

    request = read_job_file(file)
    job = quarry.submit(request, key=key, priority=priority)
    _show([job], as_json)
    if follow:
        watch(job.id, quarry, as_json)


@app.command("list")
def list_jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many of the newest.")] = 50,
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    _show(islice(quarry.jobs(state=state), limit), as_json)


@app.command()
def show(
    job_id: JobIdArgument,
    request: Annotated[
        bool, typer.Option("--request", help="Print the job's request as JSON instead.")
    ] = False,
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Print the state of a job."""
    if request:
        show_document(quarry.request(job_id), as_json)
        return
    job = quarry.job(job_id)
    if as_json:
        show_json(job)
        return
    show_facts(_facts(job))
    if job.problem is not None:
        complain(job.problem)


@app.command()
def watch(job_id: JobIdArgument, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Follow a job until it ends, is blocked or paused; with --json, print a line for each change."""
    from service.cli.progress_bar import progress_display

    last = None
    with nullcontext() if as_json else progress_display(sys.stderr) as display:
        for job in quarry.follow(job_id):
            if display is not None:
                display.show(job)
            elif job != last:
                show_json(job)
                sys.stdout.flush()
            last = job
    if job.problem is not None and not as_json:
        complain(job.problem)
    if job.state is JobState.BLOCKED:
        raise typer.Exit(EXIT_BLOCKED)
    if job.state is not JobState.COMPLETED:
        raise typer.Exit(EXIT_NOT_COMPLETE)


@app.command()
def cancel(job_id: JobIdArgument, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Cancel a job; what it has committed is kept."""
    _show([quarry.cancel(job_id)], as_json)


@app.command()
def pause(job_id: JobIdArgument, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Pause a job until it is resumed; what it has committed is kept."""
    _show([quarry.pause(job_id)], as_json)


@app.command()
def resume(job_id: JobIdArgument, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Queue a paused, blocked, failed or cancelled job again."""
    _show([quarry.resume(job_id)], as_json)


@app.command(context_settings={"ignore_unknown_options": True})  # negative numbers look like options
def priority(
    job_id: JobIdArgument,
    value: Annotated[int, typer.Argument(min=-100, max=100, metavar="PRIORITY")],
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Set a job's priority; jobs with a higher one run first."""
    _show([quarry.set_priority(job_id, value)], as_json)


@app.command()
def delete(
    job_id: JobIdArgument,
    dataset: Annotated[
        bool, typer.Option("--dataset", help="Also delete its dataset from the service's data folder.")
    ] = False,
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Delete a job that has ended; what it pushed to the Hub stays there."""
    quarry.delete(job_id, dataset=dataset)
    say(json.dumps({"deleted": job_id}) if as_json else job_id)


@app.command()
def rejects(job_id: JobIdArgument, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Print the rejected samples, and why."""
    show_list(
        quarry.rejects(job_id),
        as_json,
        ("row", "id", "reason", "detail"),
        lambda reject: (reject.position, reject.source_id or "-", reject.reason, reject.detail),
    )


@app.command()
def files(job_id: JobIdArgument, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Print the shards of a job and where each one is; with --json, the units with digests."""
    repository, every = quarry.job(job_id).repository, quarry.units(job_id)
    if as_json:
        show_json(*every)
        return
    rows = []
    for unit in every:
        places = {"data folder": unit.in_folder, repository: unit.in_repository}
        held = ", ".join(str(place) for place, holds in places.items() if holds) or "gone"
        rows += [(shard.path, decimal(shard.bytes), held) for shard in unit.shards]
    show_table(("path", "size", "in"), rows)


@app.command()
def redeliver(job_id: JobIdArgument, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Send a job's last report to its webhook again."""
    _show([quarry.redeliver(job_id)], as_json)


@app.command("webhook-secret")
def webhook_secret(quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Print the secret that signs the webhooks of this key's jobs."""
    answer = quarry.webhook_secret()
    say(answer.model_dump_json() if as_json else answer.secret)


def _show(jobs: Iterable[JobSummary], as_json: bool) -> None:
    show_list(jobs, as_json, HEADS, fields)


def fields(job: JobSummary) -> tuple[str, ...]:
    """Return a job as a row for the header `HEADS`."""
    from service.cli.progress_bar import counts

    created = f"{job.created_at:%Y-%m-%d %H:%M} UTC"
    return job.id, job.state.value, counts(job.progress), created, job.model, job.waits or ""


def _facts(job: JobSummary) -> list[tuple[str, object]]:
    from service.cli.progress_bar import amounts, counts, to_upload

    progress = job.progress
    units = f"{progress.units_done} of {progress.units_planned}{to_upload(job)}"
    return [
        ("id", job.id),
        ("state", job.state.value),
        ("waits", job.waits),
        ("model", job.model),
        ("progress", f"{counts(progress)}, {amounts(progress)}"),
        ("units", units + (f", {progress.units_failed} failed" if progress.units_failed else "")),
        ("priority", job.priority),
        ("owner", job.owner),
        ("repository", job.repository),
        ("commit", job.hub_commit),
        ("created", f"{job.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("updated", f"{job.updated_at:%Y-%m-%d %H:%M:%S} UTC"),
    ]
