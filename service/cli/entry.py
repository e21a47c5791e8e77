"""Assembles the commands, and turns errors into messages and exit codes."""

import errno
import os
import resource
import sys
from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from schemas.dataset.errors import NO_SPACE
from schemas.job import Problem
from service.cli import (
    datasets,
    diagnose,
    doctor,
    export,
    files,
    jobs,
    keys,
    processes,
    ray_pool,
    schedules,
    train,
    workers,
)
from service.cli.console import EXIT_NOT_COMPLETE, EXIT_USAGE, complain, exit_code
from service.client import ProblemReceived
from service.errors import DiskFull, OptionRefused, QuarryError
from service.installed import extra_of

EXIT_NOT_STARTED = 1

app = typer.Typer(
    name="quarry",
    help="Hidden states of a target LLM as proven, durable training sets for EAGLE-style drafters.",
    epilog=(
        "Exit codes: 0 success, 1 a dataset is broken, 'serve' did not start or 'doctor' found something "
        "bad, 2 wrong usage or request, 3 a job did not fully succeed, a file could not be read or "
        "written, or the service did not answer, 4 'serve' or 'worker' lost its workers, 5 a job is blocked "
        "or the Hub refuses, 6 the engine of 'worker --until-idle' keeps dying or refuses jobs, "
        "75 try again, 128 + n stopped by signal n."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"quarry {version('eagle-quarry')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(processes.serve)
app.command()(processes.worker)
app.command()(files.estimate)
app.command()(files.extract)
app.command()(datasets.verify)
app.command()(datasets.publish)
app.command()(export.export)
app.command()(diagnose.diagnose)
app.command()(doctor.doctor)
for group in (jobs, schedules, keys, workers, ray_pool, train):
    app.add_typer(group.app)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (`sys.argv` if none is given) and exit the process with its exit code."""
    # A core file would hold the secrets; children inherit the limit.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):  # of a locale that lacks characters of what is printed
            stream.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if arguments is None else arguments
    verb = next(iter(given), "")
    try:
        _check_text(given)
        app(given, prog_name="quarry")
    except QuarryError as error:
        complain(error.problem())
        sys.exit(exit_code(error))
    except ProblemReceived as error:
        complain(error.problem)
        sys.exit(EXIT_USAGE if error.problem.status == HTTPStatus.UNPROCESSABLE_ENTITY else EXIT_NOT_COMPLETE)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        detail = f"'quarry {verb}' needs {error.name}, which is not installed"
        complain(OptionRefused(detail, cure=f"pip install 'eagle-quarry[{extra}]'").problem())
        sys.exit(EXIT_USAGE)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError) and verb not in ("serve", "worker"):
            # Nobody reads the output. Typer would silently exit with 1, which would mean a broken dataset.
            sys.exit(EXIT_NOT_COMPLETE)
        raise
    except OSError as error:
        if verb == "worker":
            raise  # to its parent, code 3 would mean that the job has ended; the traceback is for the log
        _hand_over()  # reports it better if the output cannot be written
        complain(_problem(error))
        sys.exit(EXIT_NOT_STARTED if verb == "serve" else EXIT_NOT_COMPLETE)
    finally:
        _hand_over()
    sys.exit(0)


def _check_text(given: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8: they go into JSON, and to libraries that take no other names.

    Refuse empty ones, too, such as of a variable that is unset: as a folder, one is the current folder.
    """
    for before, argument in pairwise(["quarry", *given]):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            cure = "rename it, or choose a locale of UTF-8, such as LC_ALL=C.UTF-8"
            raise OptionRefused(f"{argument!r} is not UTF-8", cure=cure) from error
        name, equals, value = argument.partition("=")
        is_empty = not argument or (name.startswith("--") and equals != "" and not value)
        if is_empty and given[0] != "train":  # most of its arguments are the trainer's
            which = f"{argument!r} has no value" if argument else f"the argument after {before!r} is empty"
            cure = "give a value, or leave it out; is a variable of the shell unset?"
            raise OptionRefused(which, cure=cure)


_NO_RIGHTS = "let this user read and write there, or name another place"
_CURES = dict.fromkeys(NO_SPACE, "make space there") | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS), _NO_RIGHTS
)


def _problem(error: OSError) -> Problem:
    """Return the problem for an OSError: what the system refused, for which file, and the cure."""
    reason = error.strerror or str(error) or type(error).__name__
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    cure = f"{_CURES.get(error.errno or 0, 'fix that')}, then run the same command again"
    if not names:
        cure += " (the system names no file; it may be one in --out, TMPDIR or HF_HOME)"
    detail = f"{names}: {reason}" if names else reason
    if error.errno in NO_SPACE:
        return DiskFull(detail, cure=cure).problem()
    title = "Reading or writing failed"
    return Problem(type="urn:quarry:system-refused", title=title, status=500, detail=detail, cure=cure)


def _hand_over() -> None:
    """Flush standard output while an error of that can still be reported like any other."""
    try:
        print(end="", flush=True)
    except OSError as error:
        # Python would try to write the buffered output again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # else the reader has closed the pipe, like `head`
            error.filename = "standard output"
            complain(_problem(error))
            sys.exit(EXIT_NOT_COMPLETE)
