"""`quarry schedules`: recurring jobs of a running service."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from schemas.schedule import NewSchedule, RunView, ScheduleChange, ScheduleView
from schemas.source import Sample
from service.cli.console import (
    EXIT_NOT_COMPLETE,
    AsJson,
    AsOneJson,
    file_to_read,
    group,
    say,
    show_document,
    show_facts,
    show_json,
    show_list,
)
from service.cli.job_file import json_in, read_document
from service.cli.server import SERVER, Quarry
from service.client import ProblemReceived
from service.control.request_body import parse_body
from service.errors import OptionRefused, RequestError
from service.visible import one_line

app = group("schedules", "Make, list, change, run and delete the schedules of a running service.")

POSTED_AT_ONCE, POSTED_BYTES = 1000, 2**20
"""Most samples in one post, and bytes after which no more are added: a service takes bodies of 8 MiB."""
MAX_LINE_BYTES = 2**26

Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.command()
def add(
    file: Annotated[Path, file_to_read("The schedule, as JSON or YAML.")],
    preview: Annotated[
        bool, typer.Option("--preview", help="Check the schedule and print its next slots, but keep nothing.")
    ] = False,
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Make a schedule: its name, cron expression, time zone and rules, and the request of its jobs."""
    new = parse_body(NewSchedule, read_document(file))
    _print(quarry.add_schedule(new, preview=preview), as_json)


@app.command("list")
def list_schedules(quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """List schedules by name."""
    listed, problem = _listed(quarry)
    if listed or problem is None:
        _show(listed, as_json)
    if problem is not None:
        raise problem


@app.command()
def check(quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Print the schedules that are failing; the exit code is 3 if there are any."""
    listed, problem = _listed(quarry)
    failing = [schedule for schedule in listed if schedule.failing]
    if failing:
        _show(failing, as_json)
    if problem is not None:
        raise problem
    if failing:
        raise typer.Exit(EXIT_NOT_COMPLETE)


@app.command()
def show(
    name: Name,
    request: Annotated[
        bool, typer.Option("--request", help="Print the request of its jobs instead.")
    ] = False,
    quarry: Quarry = SERVER,
    as_json: AsOneJson = False,
) -> None:
    """Print a schedule, its next five slots, and the outcomes of the last ones."""
    if request:
        show_document(quarry.schedule_request(name), as_json)
        return
    schedule = quarry.schedule(name)
    runs = list(islice(quarry.runs(name), 10))
    _print(schedule, as_json, runs)


@app.command()
def change(
    name: Name,
    file: Annotated[Path, file_to_read("What to change: fields of a schedule, as JSON or YAML.")],
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Change the fields that a file has, also the request of its jobs; which samples it wrote stays known."""
    fields = read_document(file)
    named = fields.pop("name", name)
    if named != name:
        detail = f"{file} is of schedule {named!r}, not of {name!r}"
        raise OptionRefused(
            detail, field="name", cure="name that schedule, or leave the name out of the file"
        )
    _print(quarry.change_schedule(name, parse_body(ScheduleChange, fields)), as_json)


@app.command()
def pause(name: Name, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Make no jobs until the schedule is resumed; slots during the pause are skipped."""
    _show([quarry.change_schedule(name, ScheduleChange(paused=True))], as_json)


@app.command()
def resume(name: Name, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Make jobs again, from the next slot on."""
    _show([quarry.change_schedule(name, ScheduleChange(paused=False))], as_json)


@app.command()
def run(name: Name, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Make a job now, in addition to those of the slots."""
    # In this order: if an error followed the making of the job, a retry would make it again.
    schedule, made = quarry.schedule(name), quarry.run_schedule(name)
    say(made.model_dump_json(ensure_ascii=True) if as_json else _run_line(made, schedule))


@app.command()
def post(
    name: Name,
    file: Annotated[Path, file_to_read("Samples as JSON, one per line.")],
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Post samples for the next job of a schedule whose source is of kind `posted`; safe to repeat."""
    posted = sum(quarry.post_samples(name, batch).samples for batch in _batches(file))
    said = f"{posted} samples wait for the next job of {name}"
    say(json.dumps({"samples": posted}) if as_json else said)


@app.command()
def delete(name: Name, quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """Delete a schedule; its jobs stay."""
    quarry.delete_schedule(name)
    say(json.dumps({"deleted": name}) if as_json else name)


def _batches(file: Path) -> Iterator[list[Sample]]:
    """Yield the samples of a file in batches that can be posted. Raises RequestError with the line."""
    batch: list[Sample] = []
    num_bytes = 0
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), 1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            document = json_in(line, place)
            try:
                batch.append(parse_body(Sample, document))
            except RequestError as error:
                detail = f"{place}: {error.detail}"
                raise RequestError(detail, field=error.field, cure=error.cure) from error
            num_bytes += len(line)
            if len(batch) == POSTED_AT_ONCE or num_bytes >= POSTED_BYTES:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch


def _listed(quarry: Quarry) -> tuple[list[ScheduleView], ProblemReceived | None]:
    """Return the schedules that can be read, and the problem that ended the list."""
    listed: list[ScheduleView] = []
    try:
        for schedule in quarry.schedules():
            listed.append(schedule)
    except ProblemReceived as error:
        return listed, error
    return listed, None


def _show(schedules: Iterable[ScheduleView], as_json: bool) -> None:
    show_list(schedules, as_json, ("name", "state", "cron", "next", "last"), _fields)


def _fields(schedule: ScheduleView) -> tuple[str, ...]:
    upcoming = schedule.shown(schedule.next_slots[0]) if schedule.next_slots else "-"
    last = _run_line(schedule.last_run, schedule) if schedule.last_run else "no run yet"
    return schedule.name, _state(schedule), schedule.cron, upcoming, last


def _state(schedule: ScheduleView) -> str:
    return f"{schedule.state.value}, failing" if schedule.failing else schedule.state.value


def _run_line(run: RunView, schedule: ScheduleView) -> str:
    parts = [schedule.shown(run.slot), run.outcome.value, run.job_id, run.job_state]
    if run.samples_written is not None:
        parts.append(f"{run.samples_written} written, {run.samples_rejected} rejected")
    parts.append(one_line(run.detail or ""))
    return "  ".join(filter(None, parts))


def _print(schedule: ScheduleView, as_json: bool, runs: Sequence[RunView] = ()) -> None:
    if as_json:
        show_json(schedule)
        return
    waiting = schedule.waiting_slot
    facts: list[tuple[str, object]] = [
        ("name", schedule.name),
        ("state", _state(schedule)),
        ("cron", f"{schedule.cron} ({schedule.time_zone})"),
        ("missed", schedule.missed.value),
        ("overlap", schedule.overlap.value),
        ("samples", f"{schedule.samples.value}, changed recipe: {schedule.changed_recipe.value}"),
        *(("next", schedule.shown(slot)) for slot in schedule.next_slots),
        ("waiting", f"{schedule.shown(waiting)}, until the previous job ends" if waiting else None),
        ("last good", schedule.shown(schedule.last_good_at) if schedule.last_good_at else "never"),
        *(("run", _run_line(run, schedule)) for run in runs),
    ]
    show_facts(facts)
