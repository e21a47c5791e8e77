"""Drives an export: a few pieces at once, each sealed before it counts, what is there already skipped.

While one piece waits for the disk, others are read, normed and checksummed, beside Python's lock. Pieces end
in any order and count in theirs, so that what is told is the same as of one after another.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from schemas.dataset.seal import sealing
from service.errors import OptionRefused, SourceRefused
from service.export.format import Format, Piece
from service.export.lock import locked
from service.export.options import ExportOptions, FormatName
from service.export.record import begin, end, identity_of
from service.export.source import Source, open_source
from service.reader import ReaderError, Row

PIECES_AT_ONCE = 4
"""In memory at most, each by a row unless its format needs a whole piece."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished export. `rows` are in its files, of `rows_in_dataset`; `notes` say how to train."""

    rows: int
    rows_in_dataset: int
    notes: str


def export(
    where: str, out: Path, options: ExportOptions, told: Callable[[int, int], None] = lambda _done, _all: None
) -> Exported:
    """Write the dataset `where` to the folder `out`, or go on where an earlier call stopped.

    One export at a time writes there. `told` hears of rows done and rows in the dataset after each file.
    Raises SourceRefused (`dataset`, `job`), OptionRefused, IdentityChanged, DatasetBroken,
    UnknownModel, EngineRefused, HubUnavailable, OSError.
    """
    try:
        return _export(open_source(where, options), out, told)
    except ReaderError as error:
        cure = "run 'quarry verify' on it, or name the root of a dataset that Quarry made"
        raise SourceRefused(str(error), field="dataset", cure=cure) from error


def format_of(source: Source) -> Format:
    """Return the format that the options name. Raises OptionRefused."""
    to = source.options.to
    if source.options.max_tokens is not None and to is not FormatName.NEMO:
        cure = "leave --max-tokens out; the trainer cuts rows itself"
        raise OptionRefused(f"{to} takes rows of any length", field="max_tokens", cure=cure)
    made: Format = import_module(f"service.export.formats.{to}").make(source)
    return made


def _export(source: Source, out: Path, told: Callable[[int, int], None]) -> Exported:
    made = format_of(source)
    with locked(out):
        return _write(source, made, out, told)


def _write(source: Source, made: Format, out: Path, told: Callable[[int, int], None]) -> Exported:
    identity = identity_of(source, made.trainer_layers)
    finished = begin(out, identity)
    notes, done = made.notes(out), 0
    # Closed before the folder is unlocked, whatever ends the loop: no piece is written after that.
    with closing(_sealed(source, made, out)) as pieces:
        for piece in pieces:
            done += len(piece.numbers)
            told(done, len(source.rows))
    if not finished:
        made.finish(out)
        end(out, identity, done, notes)
    return Exported(done, len(source.rows), notes)


def _sealed(source: Source, made: Format, out: Path) -> Generator[Piece]:
    """Yield every piece in order, once its file is there durably; an error comes in its piece's place."""

    def seal(piece: Piece) -> Piece:
        if not (out / piece.path).exists():
            with sealing(out / piece.path) as temporary:
                made.write(temporary, _rows(source, piece.numbers))
        return piece

    coming: deque[Future[Piece]] = deque()
    with ThreadPoolExecutor(PIECES_AT_ONCE) as pool:
        try:
            for piece in made.pieces():
                coming.append(pool.submit(seal, piece))
                if len(coming) > PIECES_AT_ONCE:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _rows(source: Source, numbers: Iterable[int]) -> Iterator[Row]:
    for number in numbers:
        yield source.rows.row(number)
