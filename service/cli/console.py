"""Output for people and scripts: tables, problems on stderr, exit codes."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import typer
from pydantic import BaseModel

from schemas.job import Problem
from service.errors import DatasetBroken, Outcome, QuarryError, RequestError
from service.visible import one_line

Model = TypeVar("Model", bound=BaseModel)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
AsOneJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

EXIT_BROKEN = 1
EXIT_USAGE = 2
EXIT_NOT_COMPLETE = 3
EXIT_BLOCKED = 5
EXIT_TRY_AGAIN = os.EX_TEMPFAIL
"""The failure may be transient: the only code after which a batch system reruns the same command."""

WIDE = 15
"""Characters of a field that a table keeps on one line; a longer one may be folded, except the first."""


def group(name: str, purpose: str) -> typer.Typer:
    """Return a group of commands."""
    return typer.Typer(name=name, help=purpose, no_args_is_help=True, rich_markup_mode=None)


def file_to_read(purpose: str) -> Any:  # noqa: ANN401 - typer's own
    """Return the argument of a command that is an existing file."""
    return typer.Argument(metavar="FILE", exists=True, dir_okay=False, help=purpose)


def exit_code(error: QuarryError) -> int:
    """Return the exit code of a command that ended with `error`."""
    if isinstance(error, DatasetBroken):
        return EXIT_BROKEN
    if isinstance(error, RequestError):
        return EXIT_USAGE
    by_outcome = {Outcome.RETRY: EXIT_TRY_AGAIN, Outcome.BLOCK: EXIT_BLOCKED}
    return by_outcome.get(error.outcome, EXIT_NOT_COMPLETE)


def complain(problem: Problem) -> None:
    """Print a problem to stderr: what, where, and what to do."""
    lines = [f"error: {problem.title}: {problem.detail}"]
    if problem.field:
        lines.append(f"  field: {problem.field}")
    if problem.cure:
        lines.append(f"  cure:  {problem.cure}")
    for line in lines:
        say(line, file=sys.stderr)


def say(*fields: object, file: TextIO | None = None) -> None:
    """Print one line of tab-separated fields, with unprintable characters made visible."""
    print(*(one_line(str(field)) for field in fields), sep="\t", file=file)


def show_json(*models: BaseModel) -> None:
    """Print each as one line of JSON."""
    for model in models:
        say(model.model_dump_json(ensure_ascii=True))


def show_document(model: BaseModel, as_json: bool) -> None:
    """Print a request as JSON that can be submitted: on one line if `as_json`, else indented."""
    print(model.model_dump_json(indent=None if as_json else 2, ensure_ascii=True))


def show_list(
    models: Iterable[Model], as_json: bool, heads: Sequence[str], fields: Callable[[Model], Sequence[object]]
) -> None:
    """Print each as one line of JSON, or its `fields` as a row of a table."""
    if as_json:
        for model in models:
            show_json(model)
    else:
        show_table(heads, map(fields, models))


def show_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on a terminal, or where that is too narrow, each row's fields one below the other.

    Elsewhere print a line of tab-separated fields for each row. On a terminal, empty columns are left out,
    and so are empty fields where they are below one another.
    """
    if not sys.stdout.isatty():
        for row in rows:
            say(*row)
        return
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console, texts = Console(), [[one_line(str(field)) for field in row] for row in rows]
    widths = [
        max((len(row[number]) for row in texts), default=len(head)) for number, head in enumerate(heads)
    ]
    shown = [number for number, width in enumerate(widths) if width]
    least = widths[0] + sum(2 + min(widths[number], WIDE) for number in shown[1:])
    if least <= console.width:
        columns = [Column(heads[number], overflow="fold", no_wrap=number == 0) for number in shown]
        table = Table(*columns, box=None, pad_edge=False)
        for row in texts:
            table.add_row(*(Text(row[number]) for number in shown))
        console.print(table)
        return
    for row in texts:
        show_facts((head, field or None) for head, field in zip(heads, row, strict=True))
        print()


def show_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one below the other; a value of none is left out."""
    known = [(name, value) for name, value in facts if value is not None]
    width = max(len(name) for name, _ in known)
    for name, value in known:
        say(f"{name:{width}}  {value}")


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """Let a system error name `place` if it names no file: it does so only for a file that it opens.

    A library's own OSError has no number and is left alone.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(place)
        raise
