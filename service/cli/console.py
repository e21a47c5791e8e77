"""What people and scripts see: problems on stderr, exit codes, settings made from options."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError
from pydantic_settings import SettingsError

from schemas.job import Problem
from service.errors import DatasetBroken, OptionRefused, Outcome, QuarryError, RequestError
from service.settings import Settings
from service.visible import one_line, visible

SECRET_VARIABLES = frozenset({"QUARRY_HUB_TOKEN", "QUARRY_DATABASE_URL"})

EXIT_BROKEN = 1
EXIT_USAGE = 2
EXIT_NOT_COMPLETE = 3
EXIT_BLOCKED = 5
EXIT_TRY_AGAIN = os.EX_TEMPFAIL
"""What failed may pass: the one failure after which a batch system runs the same command again."""


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
    """Print one line, its fields apart by tabs; what others named is made visible in it."""
    print(*(one_line(str(field)) for field in fields), sep="\t", file=file)


def load_settings(**options: Any) -> Settings:  # noqa: ANN401 - a value of any setting
    """Return the settings of the environment; an option that was given wins.

    What is secret is taken out of the environment, which every child would inherit.

    Raises:
        OptionRefused: naming the first setting that cannot be used.
    """
    try:
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise OptionRefused(
            first["msg"], field=name, cure=f"fix the option or QUARRY_{name.upper()}"
        ) from error
    except SettingsError as error:
        raise OptionRefused(str(error), cure="lists and objects in QUARRY_ variables are JSON") from error
    for name in [name for name in os.environ if name.upper() in SECRET_VARIABLES]:
        del os.environ[name]
    return settings


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_to_stderr(level: int = logging.INFO) -> None:
    """Let this process's loggers write lines to stderr."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """Let an error of the system say `place` where it names no file: it does so only for one that it opens.

    A library's own OSError has no number and stays as it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(place)
        raise
