"""What every trainer's format fills in.

Legend: T tokens of a row, A auxiliary layers, H hidden size.
"""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from service.reader import Row
from service.visible import one_line


@dataclass(frozen=True, slots=True)
class Piece:
    """A file of rows: its path below the export's folder, and the numbers of its rows in the dataset."""

    path: str
    numbers: range


class Format(Protocol):
    """One trainer's files. Every file's bytes follow from the dataset and the options alone."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the files of rows in order; a row that the trainer cannot take is in none."""

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write a piece; holds one row in memory at a time where the format lets it.

        Raises OptionRefused if a row cannot be written in this format.
        """

    def finish(self, out: Path) -> None:
        """Write the files beside the rows, once all rows are there."""

    @property
    def trainer_layers(self) -> list[int]:
        """The auxiliary layers as the trainer counts them."""

    def notes(self, out: Path) -> str:
        """Return what to run, in Markdown: the trainer's exact command, and what to know before."""


def shell_block(*lines: str | tuple[str, ...]) -> str:
    """Return one command in Markdown, a line each; the words of a tuple are quoted for the shell."""
    told = (line if isinstance(line, str) else one_line(shlex.join(line)) for line in lines)
    return "```sh\n" + " \\\n    ".join(told) + "\n```\n\n"


def one_file_each(pattern: str, numbers: Iterable[int]) -> Iterator[Piece]:
    """Yield a piece for every row; `pattern` takes its `number` and the `folder` of 2000 that holds it."""
    for number in numbers:
        begin = number // 2000 * 2000
        folder = f"rows_{begin}-{begin + 2000}"
        yield Piece(pattern.format(number=number, folder=folder), range(number, number + 1))
