"""What a trainer's format is, and what most formats share.

Legend: T tokens of a row, A auxiliary layers, H hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from service.errors import OptionRefused
from service.export.saving import save_torch
from service.export.source import Source
from service.reader import Row


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows: its path below the export's folder, and the numbers of its rows in the dataset."""

    path: str
    numbers: range


@dataclass(frozen=True, slots=True)
class Format(ABC):
    """One trainer's files. Every file's bytes follow from the dataset and the options alone."""

    source: Source

    @property
    def trainer_layers(self) -> list[int]:
        """The auxiliary layers as the trainer counts them: for most the first layer's output is 0."""
        return [layer_id - 1 for layer_id in self.source.layers]

    @property
    def model(self) -> str:
        """The target as the trainer is to load it."""
        return self.source.options.target or self.source.identity.model

    @abstractmethod
    def row_files(self) -> Iterator[RowFile]:
        """Yield the files of rows in order; a row that the trainer cannot take is in none."""

    @abstractmethod
    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write a file of rows; holds one row in memory at a time where the format lets it.

        Raises OptionRefused if a row cannot be written in this format.
        """

    @abstractmethod
    def finish(self, out: Path) -> None:
        """Write the files beside the rows, once all rows are there."""


class FileEachRow(Format):
    """A format with one file for every row."""

    PATH: ClassVar[str]
    """Takes the row's `number` and the `folder` of 2000 that holds it."""

    def row_files(self) -> Iterator[RowFile]:
        """Yield a file for each row."""
        for number in self.numbers():
            begin = number // 2000 * 2000
            path = self.PATH.format(number=number, folder=f"rows_{begin}-{begin + 2000}")
            yield RowFile(path, range(number, number + 1))

    def numbers(self) -> Iterable[int]:
        """Return the numbers of the rows that the trainer takes."""
        return range(len(self.source.rows))


class TorchFileEachRow(FileEachRow):
    """A format with one file of `torch.save` for every row."""

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write one row."""
        for row in rows:
            save_torch(temporary, self.content(row))

    @abstractmethod
    def content(self, row: Row) -> dict[str, Any]:
        """Return what a row's file holds."""


def refuse_draft_vocab(source: Source, drafter: str) -> None:
    """Raise OptionRefused (`draft_vocab`) if there is one: `drafter` names who drafts from the whole."""
    if source.options.draft_vocab is not None:
        raise OptionRefused(
            f"{drafter} from the target's whole vocabulary",
            field="draft_vocab",
            cure="leave --draft-vocab out",
        )
