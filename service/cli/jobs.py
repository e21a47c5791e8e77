"""`quarry jobs`: the jobs of a running service."""

import json
import sys
from typing import Annotated

import typer

from schemas.job import JobPage, JobState, JobSummary, RejectPage
from schemas.names import is_job_id
from service.cli.console import EXIT_NOT_COMPLETE, complain, say
from service.client import Client

app = typer.Typer(
    help="List, follow, pause, cancel, resume and delete the jobs of a running service.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _checked_id(value: str) -> str:
    if not is_job_id(value):
        raise typer.BadParameter("a job id is 'j-' and 16 hex digits")
    return value


Server = Annotated[str, typer.Option(envvar="QUARRY_SERVER", help="Base URL of the service.")]
JobIdArgument = Annotated[str, typer.Argument(metavar="ID", callback=_checked_id)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]

DEFAULT_SERVER = "http://127.0.0.1:8642"


@app.command("list")
def list_jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Show at most this many, the newest.")] = 50,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with Client(server) as client:
        page = JobPage.model_validate(client.call("GET", "/jobs", {"state": state, "limit": limit}))
    for job in page.jobs:
        say(job.model_dump_json(ensure_ascii=True) if as_json else line(job))


@app.command()
def show(
    job_id: JobIdArgument,
    server: Server = DEFAULT_SERVER,
    request: Annotated[bool, typer.Option("--request", help="Print the job's request instead.")] = False,
) -> None:
    """Print a job as JSON."""
    with Client(server) as client:
        path = f"/jobs/{job_id}/request" if request else f"/jobs/{job_id}"
        print(json.dumps(client.call("GET", path), indent=2))


@app.command()
def watch(job_id: JobIdArgument, server: Server = DEFAULT_SERVER) -> None:
    """Follow a job until it has ended or is blocked."""
    from service.cli.progress_bar import progress_display

    with Client(server) as client, progress_display(sys.stderr) as display:
        for job in client.follow(job_id):
            display.show(job)
    if job.problem is not None:
        complain(job.problem)
    if job.state is not JobState.COMPLETED:
        raise typer.Exit(EXIT_NOT_COMPLETE)


@app.command()
def cancel(job_id: JobIdArgument, server: Server = DEFAULT_SERVER) -> None:
    """Stop a job; what it has committed is kept."""
    with Client(server) as client:
        say(line(client.job("POST", f"/jobs/{job_id}/cancel")))


@app.command()
def pause(job_id: JobIdArgument, server: Server = DEFAULT_SERVER) -> None:
    """Pause a job until it is resumed; what it has committed is kept."""
    with Client(server) as client:
        say(line(client.job("POST", f"/jobs/{job_id}/pause")))


@app.command()
def priority(
    job_id: JobIdArgument,
    value: Annotated[int, typer.Argument(min=-100, max=100, metavar="PRIORITY")],
    server: Server = DEFAULT_SERVER,
) -> None:
    """Set a job's priority: jobs of a higher one are worked on first."""
    with Client(server) as client:
        say(line(client.job("PATCH", f"/jobs/{job_id}", {"priority": value})))


@app.command()
def delete(
    job_id: JobIdArgument,
    dataset: Annotated[
        bool, typer.Option("--dataset", help="Delete its dataset from the service's data folder, too.")
    ] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Delete a job that has ended; what it pushed to the Hub stays there."""
    with Client(server) as client:
        client.call("DELETE", f"/jobs/{job_id}", {"dataset": "delete" if dataset else "keep"})
    say(job_id)


@app.command()
def resume(job_id: JobIdArgument, server: Server = DEFAULT_SERVER) -> None:
    """Queue a paused, blocked, failed or cancelled job again."""
    with Client(server) as client:
        say(line(client.job("POST", f"/jobs/{job_id}/resume")))


@app.command()
def rejects(job_id: JobIdArgument, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Print the samples that are not in the dataset, and why."""
    after: int | None = None
    with Client(server) as client:
        while True:
            page = RejectPage.model_validate(client.call("GET", f"/jobs/{job_id}/rejects", {"after": after}))
            for reject in page.rejects:
                fields = (reject.position, reject.source_id or "-", reject.reason, reject.detail)
                say(*((reject.model_dump_json(ensure_ascii=True),) if as_json else fields))
            if page.next_after is None:
                return
            after = page.next_after


def line(job: JobSummary) -> str:
    """Return a job in one line."""
    from service.cli.progress_bar import counts

    created = f"{job.created_at:%Y-%m-%d %H:%M:%S}"
    waits = f"  waits: {job.waits}" if job.waits else ""
    return f"{job.id}  {job.state.value:10}  {counts(job.progress)}  {created}  {job.model}{waits}"
