"""Drives an export: writes a few files at once, seals each, and skips those already written.

While one file waits for the disk, others are read, normed and checksummed, all of which releases the GIL. The
export ends with the error of the first file, in order, that has one.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from schemas.dataset.seal import sealing
from service.errors import OptionRefused
from service.export.format import Format, RowFile
from service.export.notes import notes_of
from service.export.options import ExportOptions, FormatName
from service.export.record import LOCK, RECORD, begin, end, export_identity
from service.export.saving import seal_missing
from service.export.source import Source, open_dataset, refusing_datasets
from service.export.target import refuse_another_name
from service.export.vocabulary import draft_vocabulary
from service.folder_lock import locked
from service.reader.ahead import made_ahead

FILES_AT_ONCE = 4
"""How many files are written at once; each takes one row of memory unless its format needs the whole file."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished export. Its files have `rows` of the `rows_in_dataset`; `notes` say how to train."""

    rows: int
    rows_in_dataset: int
    notes: str


def export(where: str, out: Path, options: ExportOptions) -> Exported:
    """Export the dataset `where` to the folder `out`, or continue where an earlier call stopped.

    Only one export at a time may write there. Raises SourceRefused (`dataset`, `job`), OptionRefused,
    IdentityChanged, UnknownModel, EngineRefused, HubUnavailable, OSError.
    """
    with refusing_datasets():
        source = open_dataset(where, options)
        trainer_format = format_of(source)
        refuse_another_name(source)
        if (size := options.draft_vocab) is not None and not (out / RECORD).exists():
            draft_vocabulary(source, size)  # it is written last: what is wrong would show behind all rows
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / LOCK, f"another export is writing to {out}", "out"):
            return _write(source, trainer_format, out)


def format_of(source: Source) -> Format:
    """Return the format that the options name. Raises OptionRefused."""
    to = source.options.to
    if source.options.max_tokens is not None and to is not FormatName.NEMO:
        cure = "leave --max-tokens out; the trainer cuts rows itself"
        raise OptionRefused(f"{to} takes rows of any length", field="max_tokens", cure=cure)
    trainer_format: Format = import_module(f"service.export.formats.{to}").make(source)
    return trainer_format


def _write(source: Source, trainer_format: Format, out: Path) -> Exported:
    identity = export_identity(source, trainer_format.trainer_layers)
    is_ended = begin(out, identity)
    notes = notes_of(trainer_format, out)
    num_rows = _write_rows(source, trainer_format, out)
    seal_missing(out, trainer_format.beside(out))
    if not is_ended:
        end(out, identity, num_rows, notes)
    return Exported(num_rows, len(source.rows), notes)


def _write_rows(source: Source, trainer_format: Format, out: Path) -> int:
    """Write every file of rows that does not exist yet; return the number of rows in all files."""

    def seal(row_file: RowFile) -> int:
        if not (out / row_file.path).exists():
            with sealing(out / row_file.path) as temporary:
                trainer_format.write(temporary, map(source.rows.row, row_file.numbers))
        return len(row_file.numbers)

    files = trainer_format.row_files()
    return sum(made_ahead(seal, files, ahead=FILES_AT_ONCE, threads=FILES_AT_ONCE))
