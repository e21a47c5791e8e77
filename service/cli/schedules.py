"""`quarry schedules`: jobs that a running service makes again and again."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from schemas.schedule import RunPage, RunView, SchedulePage, ScheduleView
from service.cli.console import EXIT_NOT_COMPLETE, say
from service.cli.job_file import read_document
from service.cli.jobs import DEFAULT_SERVER, AsJson, Server
from service.client import Client
from service.control.request_body import parse_json

app = typer.Typer(
    help="Make, list, pause, run and delete the schedules of a running service.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

POSTED_AT_ONCE = 1000

Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.command()
def add(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="The schedule, as JSON or YAML."),
    ],
    preview: Annotated[
        bool, typer.Option("--preview", help="Check it and print its next slots, but keep nothing.")
    ] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Make a schedule: its name, cron row, time zone and rules, and the request of its jobs."""
    with Client(server) as client:
        answer = client.call("POST", "/schedules", {"preview": str(preview).lower()}, read_document(file))
    _print(ScheduleView.model_validate(answer))


@app.command("list")
def list_schedules(server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """List schedules by name."""
    for schedule in _every(server):
        say(schedule.model_dump_json(ensure_ascii=True) if as_json else _line(schedule))


@app.command()
def check(server: Server = DEFAULT_SERVER) -> None:
    """Print the schedules that are failing; the exit code is 3 if there are any."""
    failing = [schedule for schedule in _every(server) if schedule.failing]
    for schedule in failing:
        say(_line(schedule))
    if failing:
        raise typer.Exit(EXIT_NOT_COMPLETE)


@app.command()
def show(
    name: Name,
    server: Server = DEFAULT_SERVER,
    request: Annotated[
        bool, typer.Option("--request", help="Print the request of its jobs instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print a schedule, its next five slots, and what became of the last ones."""
    with Client(server) as client:
        if request:
            print(json.dumps(client.call("GET", f"/schedules/{name}/request"), indent=2))
            return
        schedule = ScheduleView.model_validate(client.call("GET", f"/schedules/{name}"))
        runs = RunPage.model_validate(client.call("GET", f"/schedules/{name}/runs", {"limit": 10})).runs
    if as_json:
        say(schedule.model_dump_json(ensure_ascii=True))
        return
    _print(schedule)
    for run in runs:
        say(f"run        {_run_line(run)}")


@app.command()
def pause(name: Name, server: Server = DEFAULT_SERVER) -> None:
    """Make no jobs until the schedule is resumed; slots during the pause are skipped."""
    _set_paused(name, server, paused=True)


@app.command()
def resume(name: Name, server: Server = DEFAULT_SERVER) -> None:
    """Make jobs again, from the next slot on."""
    _set_paused(name, server, paused=False)


@app.command()
def run(name: Name, server: Server = DEFAULT_SERVER) -> None:
    """Make a job now, in addition to those of the slots."""
    with Client(server) as client:
        say(_run_line(RunView.model_validate(client.call("POST", f"/schedules/{name}/run"))))


@app.command()
def post(
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Samples as JSON, one a line."),
    ],
    server: Server = DEFAULT_SERVER,
) -> None:
    """Post samples for the next job of a schedule whose source is of kind `posted`; safe to repeat."""
    with Client(server) as client, file.open("rb") as lines:
        posted = 0
        samples = (parse_json(line) for line in lines if line.strip())
        while batch := list(islice(samples, POSTED_AT_ONCE)):
            posted += client.call("POST", f"/schedules/{name}/samples", body={"samples": batch})["samples"]
    say(f"{posted} samples wait for the next job of {name}")


@app.command()
def delete(name: Name, server: Server = DEFAULT_SERVER) -> None:
    """Delete a schedule; its jobs stay."""
    with Client(server) as client:
        client.call("DELETE", f"/schedules/{name}")
    say(name)


def _every(server: str) -> Iterator[ScheduleView]:
    after: str | None = ""
    with Client(server) as client:
        while after is not None:
            page = SchedulePage.model_validate(client.call("GET", "/schedules", {"after": after}))
            yield from page.schedules
            after = page.next_after


def _set_paused(name: str, server: str, *, paused: bool) -> None:
    with Client(server) as client:
        say(
            _line(
                ScheduleView.model_validate(
                    client.call("PATCH", f"/schedules/{name}", body={"paused": paused})
                )
            )
        )


def _line(schedule: ScheduleView) -> str:
    """Return a schedule in one line."""
    upcoming = f"{schedule.next_slots[0]:%Y-%m-%d %H:%M} UTC" if schedule.next_slots else "-"
    last = _run_line(schedule.last_run) if schedule.last_run else "no run yet"
    return f"{schedule.name:20}  {schedule.state.value:6}  {schedule.cron:15}  next {upcoming}  last {last}"


def _run_line(run: RunView) -> str:
    parts = [f"{run.slot:%Y-%m-%d %H:%M} UTC", run.outcome.value, run.job_id, run.job_state, run.detail]
    return "  ".join(str(part) for part in parts if part is not None)


def _print(schedule: ScheduleView) -> None:
    say(f"name       {schedule.name}")
    say(f"state      {schedule.state.value}")
    say(f"cron       {schedule.cron} ({schedule.time_zone})")
    say(f"missed     {schedule.missed.value}")
    say(f"overlap    {schedule.overlap.value}")
    say(f"samples    {schedule.samples.value}, changed recipe: {schedule.changed_recipe.value}")
    for slot in schedule.next_slots:
        say(f"next       {slot:%Y-%m-%d %H:%M} UTC")
    if schedule.waiting_slot is not None:
        say(f"waiting    {schedule.waiting_slot:%Y-%m-%d %H:%M} UTC, until the previous job ends")
    good = f"{schedule.last_good_at:%Y-%m-%d %H:%M} UTC" if schedule.last_good_at else "never"
    say(f"last good  {good}")
