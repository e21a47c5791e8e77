"""`quarry estimate` and `quarry extract`: commands on a job file."""

import logging
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import typer

from schemas.job import Estimate, JobState, Problem
from schemas.request import Part
from service.cli.console import (
    EXIT_BLOCKED,
    EXIT_NOT_COMPLETE,
    EXIT_TRY_AGAIN,
    AsOneJson,
    complain,
    file_to_read,
    say,
    show_facts,
    show_json,
)
from service.cli.job_file import own_roots, read_job_file
from service.errors import EngineDied, EngineStuck, StatesNotFinite
from service.installed import check_engine, check_python
from service.logs import log_to_stderr
from service.settings import load_settings

JobFile = Annotated[Path, file_to_read("The job, as JSON or YAML.")]


def _part(value: str) -> Part:
    index, _, of = value.partition("/")
    try:
        return Part(index=int(index), of=int(of))
    except ValueError as error:
        raise typer.BadParameter("a part is given as 3/16, the third of 16: from 1/16 to 16/16") from error


PartOption = Annotated[
    Part | None,
    typer.Option(parser=_part, metavar="I/N", help="Take the I-th of N parts of the source, counted from 1."),
]


def estimate(
    file: JobFile,
    part: PartOption = None,
    as_json: AsOneJson = False,
) -> None:
    """Print what a job would need, without running it."""
    request = read_job_file(file, part)
    settings = own_roots(load_settings(), request, file)
    from service.plan.estimate import estimate_request

    needs = estimate_request(request, settings)
    if as_json:
        show_json(needs)
    else:
        show_facts(_facts(needs))


def _facts(needs: Estimate) -> list[tuple[str, object]]:
    from rich.filesize import decimal

    layers, rows, stored = ", ".join(map(str, needs.layer_ids)), needs.row_a_turn, needs.stored_bytes
    why = rows and "; ".join(f"{count} conversations: {what}" for what, count in rows.why.items())
    return [
        ("samples", f"{needs.samples:,}, and {needs.rejected:,} that are rejected"),
        ("tokens", f"{needs.tokens:,}"),
        ("layers", f"{layers} (vLLM's ids), {needs.bytes_per_token:,} bytes a token"),
        ("states", f"{decimal(needs.bytes)} as captured"),
        ("stored", f"{'as they compress' if stored is None else decimal(stored)}, {needs.shards:,} shards"),
        ("commits", f"{needs.commits:,} on the Hub" if needs.commits else None),
        (
            "a row a turn",
            f"{rows.conversations:,} conversations in {rows.rows:,} rows, {rows.tokens:,} tokens "
            f"({rows.tokens_once:,} if each token were stored once): {why}"
            if rows
            else None,
        ),
    ]


def extract(
    file: JobFile,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder of the dataset.")
    ],
    part: PartOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Count rejected samples as a failure.")] = False,
) -> None:
    """Run one job here, without a server; run it again to continue where it stopped."""
    check_python()
    from service.cli.foreground import extract_to
    from service.cli.progress_bar import amounts, counts, progress_display

    settings = load_settings()
    log_to_stderr(settings.log_format, logging.WARNING)
    request = read_job_file(file, part)
    settings = own_roots(settings, request, file)
    check_engine(settings)
    ending = extract_to(out, request, settings, progress_display(sys.stderr))
    if ending.signal is not None:
        print(f"stopped; run the same command again to go on ({ending.state.value})", file=sys.stderr)
        raise typer.Exit(128 + ending.signal)
    if ending.problem is not None:
        complain(ending.problem)
    if not ending.completed:
        raise typer.Exit(unfinished_code(ending.state, ending.problem))
    if ending.published is not None:
        say(f"{ending.published} holds this job's dataset already: nothing was captured")
        return
    say(f"{out}: {counts(ending.progress)}, {amounts(ending.progress)}")
    if strict and ending.progress.samples_rejected:
        raise typer.Exit(EXIT_NOT_COMPLETE)


ENGINE_DEATHS = frozenset(kind("").problem().type for kind in (EngineDied, EngineStuck, StatesNotFinite))


def unfinished_code(state: JobState, problem: Problem | None) -> int:
    """Return the exit code of a run whose job has not completed and that nobody stopped.

    A job that is blocked by a dying engine may do better on another machine.
    """
    if state is JobState.BLOCKED and (problem is None or problem.type not in ENGINE_DEATHS):
        return EXIT_BLOCKED
    if problem is not None and problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return EXIT_TRY_AGAIN
    return EXIT_NOT_COMPLETE
