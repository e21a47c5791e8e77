"""The interface of a trainer's format, and what most formats share.

Legend: T tokens of a row, A auxiliary layers, H hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from service.errors import OptionRefused
from service.export.saving import Writers, save_torch
from service.export.source import Source
from service.reader import Row

PRE_NORM = frozenset({"MiMoForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"})
"""vLLM classes that pass on the state before the final norm; see docs/serving-parity.md. The last one is
Step-3.5 that also sees images.
"""


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows: its path below the export's folder, and its rows' numbers in the dataset."""

    path: str
    numbers: range


@dataclass(frozen=True, slots=True)
class Format(ABC):
    """One trainer's files. Every file's bytes depend only on the dataset and the options."""

    source: Source

    @property
    def trainer_layers(self) -> list[int]:
        """The auxiliary layers as the trainer numbers them: for most, the first layer's output is 0."""
        return [layer_id - 1 for layer_id in self.source.layers]

    @property
    def model(self) -> str:
        """The target's name or path for the trainer."""
        return self.source.options.target or self.source.identity.model

    @abstractmethod
    def row_files(self) -> Iterator[RowFile]:
        """Yield the files of rows in order; rows that the trainer cannot use are in none."""

    @abstractmethod
    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write a file of rows, holding one row in memory at a time if the format allows it.

        Raises OptionRefused if a row cannot be written in this format.
        """

    def beside(self, out: Path) -> Writers:
        """Return the files beside the rows, by their paths below `out`.

        They are written in this order once all rows are there; by default there are none.
        """
        return {}


class FileEachRow(Format):
    """A format with one file per row."""

    PATH: ClassVar[str]
    """Formatted with the row's `number` and the `folder` of its group of 2000."""

    def row_files(self) -> Iterator[RowFile]:
        """Yield one file per row."""
        for number in self.numbers():
            begin = number // 2000 * 2000
            path = self.PATH.format(number=number, folder=f"rows_{begin}-{begin + 2000}")
            yield RowFile(path, range(number, number + 1))

    def numbers(self) -> Iterable[int]:
        """Return the numbers of the rows that the trainer can use."""
        return range(len(self.source.rows))


class TorchFileEachRow(FileEachRow):
    """A format with one `torch.save` file per row."""

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write one row."""
        for row in rows:
            save_torch(temporary, self.content(row))

    @abstractmethod
    def content(self, row: Row) -> dict[str, Any]:
        """Return the content of a row's file."""


def refuse_last_layer(source: Source) -> None:
    """Raise OptionRefused (`layers`) where the last layer is an auxiliary one.

    For trainers that take it after the final norm from one engine, and before it from another.
    """
    last = source.rows.about.num_layers
    if last in source.layers:
        raise OptionRefused(
            f"{source.options.to} takes the last layer, {last}, after the final norm from one engine and "
            "before it from another: which of them an auxiliary one must be is not known",
            field="layers",
            cure=f"leave {last} out of --layers; it is written as the last layer anyway",
        )


def refuse_pre_norm(source: Source, drafter: str, cure: str) -> None:
    """Raise OptionRefused (`algorithm`) where vLLM feeds such a drafter the state before the final norm.

    `drafter` begins the message: the trainer applies no norm to what it feeds.
    """
    classes = {
        str(one.provenance.engine.options.get("model_class")) for one in source.rows.manifests.values()
    }
    if classes := classes & PRE_NORM:
        raise OptionRefused(
            f"{drafter} of {', '.join(sorted(classes))} are fed the state before the final norm, and this "
            "trainer applies none that could be left out",
            field="algorithm",
            cure=cure,
        )


def refuse_draft_vocab(source: Source, drafter: str) -> None:
    """Raise OptionRefused if a `draft_vocab` is given; `drafter` begins the message."""
    if source.options.draft_vocab is not None:
        raise OptionRefused(
            f"{drafter} from the target's whole vocabulary",
            field="draft_vocab",
            cure="leave --draft-vocab out",
        )
