"""JSONL and Parquet files, or a folder of them, under the allowed roots."""

import gzip
import hashlib
import json
import os
import re
import stat
import time
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset.seal import sha256_of
from schemas.source import WILDCARD, FileSource
from service.errors import SourceRefused
from service.plan.sources.columnar import most_media_bytes, read_batch
from service.plan.sources.conversations import COLUMNS, UTF_16, Read, read_line, used_columns
from service.plan.sources.rows import RejectReason, RowReject, SourceRow

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz")
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*JSONL_SUFFIXES, PARQUET_SUFFIX)

_PACKERS = "7z|br|bz2|deflate|gz|lz4|lzma|snappy|sz|xz|z|zip|zstd?"
PACKED = re.compile(rf".*({'|'.join(map(re.escape, SUFFIXES))})(\.({_PACKERS}))?", re.DOTALL | re.IGNORECASE)
"""Names of files of these forms, however they are compressed and written."""

_POINTER = b"version https://git-lfs."
MAX_LINE_BYTES = 64 * 2**20
"""A longer JSONL line is rejected; the reader never holds more of it than this, nor of images in Parquet."""
PARQUET_BATCH_ROWS = 64

Places = Callable[[Path], Iterator[Path]]
_State = tuple[int, int, int, int]
"""Device, inode, length and ctime, which only the kernel sets: of the last write, renaming or linking."""


def _state(stats: os.stat_result) -> _State:
    return stats.st_dev, stats.st_ino, stats.st_size, stats.st_ctime_ns


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of `files`, whose keys are paths below the source's folder, in that order.

    The files are those in `planned`, each with its place if that is known, or all. An opened file must be
    inside `roots` and not inside `closed`, whatever its path leads to by then.
    """

    source: FileSource
    roots: tuple[Path, ...]
    labels: tuple[str, ...]
    planned: Mapping[str, str | None] | None
    may_be_empty: bool
    closed: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    states: dict[str, _State] = field(default_factory=dict, compare=False)
    """The states of the files when they were read for the fingerprint."""

    def listed(self) -> "FileRows":
        """Resolve the path, following links, and list its files. Raises SourceRefused."""
        source, frozen, may_be_empty = self.source, self.planned, self.may_be_empty
        places = partial(_places, roots=self.roots, closed=self.closed)
        try:
            files = _listed(source, places) if frozen is None else self._planned(frozen, places)
            names = _readable(files) if frozen is None else list(frozen)
            if not names and not may_be_empty:
                raise _refused(f"{source.path!r} holds no {', '.join(SUFFIXES)} file", _CONVERT)
            real = {name: next(places(files[name])) for name in names}  # before anything there is looked at
            if frozen is None:
                names = [name for name in names if _is_complete(files[name], source, places)]
                # By a link, such as latest.jsonl, a file has its own name, and no second one.
                own = {files[name]: name for name in _readable(files)}
                real = dict(sorted((own.setdefault(real[name], name), real[name]) for name in names))
            for name in real:
                name.encode()  # the ids of its rows begin with the name
            rows = replace(self, files=real)
        except UnicodeEncodeError as error:
            raise _refused(f"the file name {error.object!r} is not UTF-8", "rename the file") from error
        except (OSError, RuntimeError) as error:
            # A name that is too long, a folder without permission, a link loop.
            detail = f"{source.path!r} cannot be found: {_reason(error)}"
            raise _refused(detail, "check the path, and who may read it") from error
        if not names and not may_be_empty:
            raise _refused(
                f"no file of {source.path!r} is complete yet", "wait, or change 'min_age_s' or 'marker'"
            )
        return rows

    def _planned(self, planned: Mapping[str, str | None], places: Places) -> dict[str, Path]:
        """Return the files of a plan, from where they were, or if all were moved. Raises as `_listed`."""
        with suppress(SourceRefused):
            known = {name: next(places(Path(place))) for name, place in planned.items() if place is not None}
            if len(known) == len(planned) and all(map(Path.is_file, known.values())):
                return known
        begin, wild = self.source.glob
        for place in chain(places(Path(self.source.path)), places(begin) if wild else ()):
            files = {place.name: place} if place.is_file() else {name: place / name for name in planned}
            gone = [name for name in planned if name not in files or not files[name].is_file()]
            if not gone:
                return files
        raise _refused(f"{gone[0]!r} is gone since the job was planned", "put it back")

    def frozen(self) -> object:
        """Return the files' names and places: a link may lead to others by the time they are read again."""
        return {name: str(file) for name, file in self.files.items()}

    def fingerprint(self, watch: Callable[[], None] = lambda: None) -> str:
        """Return the sha256 over the files' names and contents, and the limit."""
        digest = hashlib.sha256(json.dumps(self.source.limit).encode())
        for name, path in self.files.items():
            try:
                with _opened(path, self.roots, self.closed) as file:
                    self.states[name] = _state(os.fstat(file.fileno()))
                    sha256, _ = sha256_of(_by_descriptor(file), watch)
            except OSError as error:
                raise _unreadable(name, error) from error
            digest.update(json.dumps([name, sha256]).encode())
        return f"file:{digest.hexdigest()}"

    def check_unchanged(self) -> None:
        """Check that each path leads to the hashed file, not written since then. Raises SourceRefused."""
        for name, state in self.states.items():
            try:
                found = _state(self.files[name].stat())
            except OSError as error:
                raise _unreadable(name, error) from error
            if found != state:
                cure = "submit it again when nobody writes to it, or set 'min_age_s' or 'marker'"
                raise _refused(f"{name!r} was changed while it was read", cure)

    def rows(self) -> Iterator[SourceRow]:
        """Yield the rows of all files."""
        return islice(self._rows(), self.source.limit)

    def _rows(self) -> Iterator[SourceRow]:
        for name, path in self.files.items():
            read = _parquet_rows if name.endswith(PARQUET_SUFFIX) else _jsonl_rows
            try:
                with _opened(path, self.roots, self.closed) as file:
                    for number, (own_id, content) in enumerate(read(name, file, self.labels)):
                        yield SourceRow(own_id or f"{name}:{number}", content)
            except MemoryError:  # Arrow's MemoryError is also an ArrowException
                raise
            except (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException) as error:
                raise _unreadable(name, error) from error


def _listed(source: FileSource, places: Places) -> dict[str, Path]:
    """Return a path's file, or a folder's or glob's by their names below. Raises SourceRefused, OSError."""
    path = source.path
    place = next(places(Path(path)))
    if place.is_file():
        if not place.name.endswith(SUFFIXES):
            raise _refused(f"{path!r} is not a {', '.join(SUFFIXES)} file", _CONVERT)
        return {place.name: place}
    begin, wild = source.glob
    if place.is_dir():
        begin, wild = place, ("**", "*")
    elif not wild:
        raise _refused(f"there is no file or folder {path!r}", "check the path")
    elif ".." in wild or wild.count("**") > 1 or any("**" in part for part in wild if part != "**"):
        detail = f"{path!r} has '..' behind a wildcard, more than one '**', or '**' within a name"
        raise _refused(detail, "name the folder that it begins at, and use '**' once, as '/**/'")
    for folder in places(begin):
        matching = _matching(folder, wild, places) if folder.is_dir() else ()
        if files := {file.relative_to(folder).as_posix(): file for file in matching}:
            if "**" in wild:
                _refuse_tables(folder, _readable(files))
            return files
    return {}


def _readable(names: Collection[str]) -> list[str]:
    """Return the names of the files to read, sorted.

    Raises SourceRefused for one that is read in another form only: its rows would be silently missing.
    """
    readable = sorted(name for name in names if name.endswith(SUFFIXES))
    if unread := sorted(name for name in set(names).difference(readable) if PACKED.fullmatch(name)):
        detail = f"{unread[0]!r} is not read: its name does not end with one of {', '.join(SUFFIXES)}"
        raise _refused(detail, "unpack or rename it, or give a glob that leaves it out, such as '**/*.jsonl'")
    return readable


def _is_left_out(name: str) -> bool:
    """Return whether a folder or file is hidden, or holds what a running Hadoop or Spark job writes."""
    return name.startswith(".") or name == "_temporary"


def _is_complete(file: Path, source: FileSource, places: Places) -> bool:
    """Return whether a file's writer has finished it."""
    if source.marker is not None and not next(places(file.with_name(file.name + source.marker))).exists():
        return False
    if not file.is_file():
        if file.is_symlink():
            raise _refused(f"{file.name!r} is a link that leads to no file", "fix the link, or remove it")
        raise _refused(f"{file.name!r} is gone since its folder was listed", "submit it again")
    stats = file.stat()
    # A copy may have a time of another clock, in the future, at which it would be left out night after night.
    changed_s = min(stats.st_mtime, stats.st_ctime)
    return not source.min_age_s or time.time() - changed_s >= source.min_age_s


def _matching(folder: Path, wild: Sequence[str], places: Places) -> Iterator[Path]:
    """Return a folder's files that a glob's parts name, and that are not left out; `places` checks links."""
    # `Path.glob` passes over folders that it may not read.
    if "**" not in wild:
        return _named(folder, wild, _may_be_read, places)
    walk = wild.index("**")
    tops = list(_named(folder, wild[:walk], Path.is_dir, places)) if wild[walk + 1 :] else []
    parents = (parent for top in tops if next(places(top)) for parent in _walked(top, tops))
    return (path for parent in parents for path in _named(parent, wild[walk + 1 :], _may_be_read, places))


def _named(
    folder: Path, parts: Sequence[str], is_wanted: Callable[[Path], bool], places: Places
) -> Iterator[Path]:
    """Yield what is wanted of the paths below a folder, and not left out, that these parts name."""
    if not parts:
        yield folder
        return
    part, *rest = parts
    for path in folder.iterdir() if WILDCARD.search(part) else (folder / part,):
        if _is_left_out(path.name) or not fnmatchcase(path.name, part):
            continue
        if not rest and is_wanted(path):
            yield path
        elif rest and path.is_dir() and (not path.is_symlink() or next(places(path))):
            yield from _named(path, rest, is_wanted, places)


def _walked(folder: Path, tops: Collection[Path]) -> Iterator[Path]:
    """Yield a folder, and those below it that are not left out.

    Raises OSError for a folder that may not be read, and SourceRefused for a link to a folder that is not
    read under its own name, below one of `tops`: otherwise its rows would be silently missing.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    read = [top.resolve() for top in tops]
    for parent, folders, _ in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not _is_left_out(name)]
        for link in (path for name in folders if (path := Path(parent, name)).is_symlink()):
            real = link.resolve()
            below = [real.relative_to(top).parts for top in read if real.is_relative_to(top)]
            if all(any(map(_is_left_out, parts)) for parts in below):
                name = link.relative_to(folder).as_posix()
                detail = f"{name!r} is a link to a folder, which is not followed"
                raise _refused(detail, "remove the link, or name its folder in a source of its own, of a mix")
        yield Path(parent)


_LOGS = {"Delta": "_delta_log", "Hudi": ".hoodie", "Iceberg": "metadata/[v0-9][0-9]*.metadata.json"}
"""What a folder with a table has besides its files: a log that says which of them count."""


def _refuse_tables(top: Path, names: Collection[str]) -> None:
    """Refuse files of a table, of which `top` may be a part: rows that it no longer has would be read."""
    for parent in sorted({parent for name in names for parent in (top / name).parents}):
        for kind, log in _LOGS.items():
            if any(parent.glob(log)):
                detail = f"{parent.name!r} is {kind}'s, whose files may have rows that it no longer has"
                cure = "write the rows as Parquet elsewhere, or give a glob of files, without '**'"
                raise _refused(detail, cure)


def _may_be_read(path: Path) -> bool:
    """Return whether it is a file, or a link that leads nowhere, which is refused later."""
    return path.is_file() or (path.is_symlink() and not path.is_dir())


_CONVERT = "give JSON Lines (one object a line; `jq -c '.[]'` makes it from an array) or Parquet"


def _refused(detail: str, cure: str) -> SourceRefused:
    return SourceRefused(detail, field="source.path", cure=cure)


def _unreadable(name: str, error: Exception) -> SourceRefused:
    return _refused(f"{name!r} cannot be read: {_reason(error)}", "check that the file is whole")


def _reason(error: Exception) -> str:
    what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return what or type(error).__name__


def _places(path: Path, roots: tuple[Path, ...], closed: Path | None) -> Iterator[Path]:
    """Yield where `path` is, resolved: a relative one below each root; if nowhere, where it could be.

    Reveals nothing outside the roots or in `closed`. Raises SourceRefused.
    """
    real_roots = [root.resolve() for root in roots]
    candidates = [(root / path).resolve() for root in real_roots]  # an absolute path stays as it is
    inside = [file for file in candidates if any(file.is_relative_to(root) for root in real_roots)]
    if not inside:
        cure = "move it into one of them, or add its folder to QUARRY_SOURCE_ROOTS"
        raise _refused(f"{str(path)!r} is not inside a folder that sources may be read from", cure)
    for place in [file for file in dict.fromkeys(inside) if file.exists()] or inside[:1]:
        if closed is not None and place.is_relative_to(closed):
            detail = "it leads into the service's data folder, which holds what every owner sent"
            raise _refused(detail, "name folders outside of it")
        yield place


@contextmanager
def _opened(path: Path, roots: tuple[Path, ...], closed: Path | None) -> Iterator[IO[bytes]]:
    """Open a file and check where it is, since its path may lead elsewhere. Raises SourceRefused, OSError."""
    # O_NONBLOCK: opening a FIFO does not wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        real = _by_descriptor(file).readlink()
        is_closed = closed is not None and real.is_relative_to(closed)
        if is_closed or not any(real.is_relative_to(root.resolve()) for root in roots):
            raise _refused(f"{path.name!r} leads out of its folder since it was found", "put it back")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _refused(f"{path.name!r} is no regular file", "give a file or a folder of files")
        if os.pread(file.fileno(), len(_POINTER), 0) == _POINTER:
            raise _refused(f"{path.name!r} is Git LFS's pointer to a file", "get the file: `git lfs pull`")
        yield file


def _by_descriptor(file: IO[bytes]) -> Path:
    """Return a path that leads to the opened file."""
    return Path(f"/proc/self/fd/{file.fileno()}")


def _jsonl_rows(name: str, packed: IO[bytes], labels: Sequence[str]) -> Iterator[Read]:
    with cast(IO[bytes], gzip.GzipFile(fileobj=packed)) if name.endswith(".gz") else packed as file:
        first = True
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                _skip_line(file)
                detail = f"a line is longer than {MAX_LINE_BYTES} bytes"
                yield None, RowReject(RejectReason.LINE_TOO_LONG, detail)
            elif text := (line.removeprefix(BOM_UTF8) if first else line).strip():
                if first and text.startswith(UTF_16):
                    detail = f"{Path(name).name!r} is UTF-16, of which a line is no text by itself"
                    raise _refused(detail, "write it as UTF-8: `iconv -f UTF-16 -t UTF-8`")
                if first and text.startswith(b"["):
                    detail = f"{Path(name).name!r} holds a JSON array, not one object a line"
                    raise _refused(detail, _CONVERT)
                yield read_line(text, labels)
            else:
                continue
            first = False


def _skip_line(file: IO[bytes]) -> None:
    while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass


def _parquet_rows(name: str, opened: IO[bytes], labels: Sequence[str]) -> Iterator[Read]:
    # Memory mapping and pre-buffering would hold whole row groups.
    with pq.ParquetFile(_by_descriptor(opened), pre_buffer=False) as file:
        columns = used_columns(file.schema_arrow.names, labels)
        if twice := sorted({name for name in columns if columns.count(name) > 1}):
            raise _refused(f"{Path(name).name!r} has several columns {twice[0]!r}", "rename all but one")
        if not columns:
            detail = f"{Path(name).name!r} has none of the columns {', '.join(COLUMNS)}"
            raise _refused(detail, "rename its columns")
        if (media := most_media_bytes(file.metadata, set(columns).difference(labels))) > MAX_LINE_BYTES:
            raise _refused(
                f"{Path(name).name!r} holds {media} bytes of images or the like in a row group, beside "
                "conversations, of which only text can be captured",
                "leave out the rows that have them, and then their columns",
            )
        for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=columns, use_threads=False):
            yield from read_batch(batch, labels)
