"""`quarry schedules`: jobs that a running service makes again and again."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from schemas.schedule import NewSchedule, RunView, ScheduleChange, ScheduleView
from service.cli.console import EXIT_NOT_COMPLETE, say, show_facts, show_json, show_table
from service.cli.job_file import read_document
from service.cli.server import DEFAULT_SERVER, AsJson, Server
from service.client import Quarry
from service.control.request_body import parse_body, parse_json

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
    as_json: AsJson = False,
) -> None:
    """Make a schedule: its name, cron row, time zone and rules, and the request of its jobs."""
    new = parse_body(NewSchedule, read_document(file))
    with Quarry(server) as quarry:
        _print(quarry.add_schedule(new, preview=preview), as_json)


@app.command("list")
def list_schedules(server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """List schedules by name."""
    with Quarry(server) as quarry:
        _show(list(quarry.schedules()), as_json)


@app.command()
def check(server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Print the schedules that are failing; the exit code is 3 if there are any."""
    with Quarry(server) as quarry:
        failing = [schedule for schedule in quarry.schedules() if schedule.failing]
    if failing:
        _show(failing, as_json)
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
    with Quarry(server) as quarry:
        if request:
            print(quarry.schedule_request(name).model_dump_json(indent=2, ensure_ascii=True))
            return
        schedule = quarry.schedule(name)
        runs = list(islice(quarry.runs(name), 10))
    _print(schedule, as_json, runs)


@app.command()
def pause(name: Name, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Make no jobs until the schedule is resumed; slots during the pause are skipped."""
    with Quarry(server) as quarry:
        _show([quarry.change_schedule(name, ScheduleChange(paused=True))], as_json)


@app.command()
def resume(name: Name, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Make jobs again, from the next slot on."""
    with Quarry(server) as quarry:
        _show([quarry.change_schedule(name, ScheduleChange(paused=False))], as_json)


@app.command()
def run(name: Name, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Make a job now, in addition to those of the slots."""
    with Quarry(server) as quarry:
        made = quarry.run_schedule(name)
    if as_json:
        show_json(made)
    else:
        say(_run_line(made))


@app.command()
def post(
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Samples as JSON, one a line."),
    ],
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Post samples for the next job of a schedule whose source is of kind `posted`; safe to repeat."""
    with Quarry(server) as quarry, file.open("rb") as lines:
        posted = 0
        samples = (cast(Mapping[str, Any], parse_json(line)) for line in lines if line.strip())
        while batch := list(islice(samples, POSTED_AT_ONCE)):
            posted += quarry.post_samples(name, batch).samples
    said = f"{posted} samples wait for the next job of {name}"
    say(json.dumps({"samples": posted}) if as_json else said)


@app.command()
def delete(name: Name, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Delete a schedule; its jobs stay."""
    with Quarry(server) as quarry:
        quarry.delete_schedule(name)
    say(json.dumps({"deleted": name}) if as_json else name)


def _show(schedules: list[ScheduleView], as_json: bool) -> None:
    """Print schedules, a line each."""
    if as_json:
        show_json(*schedules)
    else:
        show_table(("name", "state", "cron", "next", "last"), map(_fields, schedules))


def _fields(schedule: ScheduleView) -> tuple[str, ...]:
    upcoming = f"{schedule.next_slots[0]:%Y-%m-%d %H:%M} UTC" if schedule.next_slots else "-"
    last = _run_line(schedule.last_run) if schedule.last_run else "no run yet"
    return schedule.name, schedule.state.value, schedule.cron, upcoming, last


def _run_line(run: RunView) -> str:
    parts = [f"{run.slot:%Y-%m-%d %H:%M} UTC", run.outcome.value, run.job_id, run.job_state, run.detail]
    return "  ".join(str(part) for part in parts if part is not None)


def _print(schedule: ScheduleView, as_json: bool, runs: Sequence[RunView] = ()) -> None:
    """Print a schedule, its next slots and its last runs."""
    if as_json:
        show_json(schedule)
        return
    waiting = schedule.waiting_slot
    facts: list[tuple[str, object]] = [
        ("name", schedule.name),
        ("state", schedule.state.value),
        ("cron", f"{schedule.cron} ({schedule.time_zone})"),
        ("missed", schedule.missed.value),
        ("overlap", schedule.overlap.value),
        ("samples", f"{schedule.samples.value}, changed recipe: {schedule.changed_recipe.value}"),
        *(("next", f"{slot:%Y-%m-%d %H:%M} UTC") for slot in schedule.next_slots),
        ("waiting", f"{waiting:%Y-%m-%d %H:%M} UTC, until the previous job ends" if waiting else None),
        ("last good", f"{schedule.last_good_at:%Y-%m-%d %H:%M} UTC" if schedule.last_good_at else "never"),
        *(("run", _run_line(run)) for run in runs),
    ]
    show_facts(facts)
