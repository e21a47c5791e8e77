"""Puts the verbs together, and turns errors into messages and exit codes."""

import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import NoReturn

import typer

from service.cli import datasets, export, files, jobs, processes
from service.cli.client import ProblemReceived
from service.cli.console import EXIT_NOT_COMPLETE, EXIT_USAGE, complain, exit_code
from service.errors import QuarryError

app = typer.Typer(
    name="quarry",
    help="Hidden states of a target LLM as proven, durable training sets for EAGLE-style drafters.",
    epilog=(
        "Exit codes: 0 all is well, 1 a dataset is broken or 'serve' did not start, 2 wrong usage or "
        "request, 3 a job did not fully succeed or somebody did not answer, 4 'serve' lost its worker, "
        "128 + n 'extract' was stopped by signal n."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(processes.serve)
app.command()(processes.worker)
app.command()(files.estimate)
app.command()(files.extract)
app.command()(datasets.verify)
app.command()(datasets.publish)
app.command()(export.export)
app.add_typer(jobs.app, name="jobs")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (`sys.argv` if none is given) and leave the process with its exit code."""
    try:
        app(arguments, prog_name="quarry")
    except QuarryError as error:
        complain(error.problem())
        sys.exit(exit_code(error))
    except ProblemReceived as error:
        complain(error.problem)
        sys.exit(EXIT_USAGE if error.problem.status == HTTPStatus.UNPROCESSABLE_ENTITY else EXIT_NOT_COMPLETE)
    sys.exit(0)
