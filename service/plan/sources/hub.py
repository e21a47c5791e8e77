"""Datasets on the Hub, streamed through `datasets`.

The names of a dataset's files come from its card or from `.huggingface.yaml`, which are untrusted. `datasets`
would read absolute paths on this node, and any URL; here it reads only files of the repository.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import chain, islice
from lzma import LZMAError
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow as pa

from schemas.source import HubSource
from service.artifacts.hub_client import reading_hub
from service.errors import SourceRefused
from service.plan.sources.columnar import name_twice, read_columns
from service.plan.sources.conversations import (
    COLUMNS,
    UTF_16,
    Read,
    json_object,
    read_line,
    read_row,
    used_columns,
)
from service.plan.sources.rows import RejectedError, RowReject, SourceRow
from service.settings import Settings

_CURE = "check the id, the configuration, the split and the revision, and that the Hub token may read it"
_FIELD = "source.repo_id"
FORMS = ("arrow", "csv", "json", "parquet", "text")
"""Builders of `datasets` that are read. Others have no conversations, or refer to other files anywhere."""
_BROKEN = (
    *(AttributeError, LookupError, RuntimeError, TypeError),
    *(EOFError, gzip.BadGzipFile, zlib.error, LZMAError, pa.ArrowException),
)
"""What `datasets` raises on bad options in a card, or a broken file."""


@dataclass(frozen=True, slots=True)
class HubRows:
    """The rows of one split at one commit, so that fingerprint and rows are of the same data."""

    source: HubSource
    commit: str
    endpoint: str | None
    token: str | Literal[False] | None = field(repr=False)
    labels: tuple[str, ...] = ()

    @classmethod
    def find(cls, source: HubSource, settings: Settings, labels: tuple[str, ...] = ()) -> "HubRows":
        """Resolve the revision to a commit. Raises SourceRefused (field `source.repo_id`), HubUnavailable."""
        from huggingface_hub import HfApi, get_token

        with reading_hub(_what(source), SourceRefused, _FIELD, _CURE):
            token = settings.reading_token(source.repo_id)
            if token is None:
                token = get_token()
            api = HfApi(endpoint=settings.hub_endpoint, token=token)
            commit = api.dataset_info(source.repo_id, revision=source.revision).sha
        if commit is None:
            raise SourceRefused(f"{_what(source)} has no commit", field=_FIELD, cure=_CURE)
        return cls(source, commit, settings.hub_endpoint, token, labels)

    def listed(self) -> "HubRows":
        """Return itself."""
        return self

    def check_unchanged(self) -> None:
        """Do nothing: a commit does not change."""

    def frozen(self) -> object:
        """Return the commit."""
        return self.commit

    def fingerprint(self, watch: Callable[[], None] = lambda: None) -> str:
        """Return the repository, configuration, split, limit and commit."""
        source = self.source
        return (
            f"hub:{source.repo_id}@{self.commit}:{source.config or 'default'}:{source.split}:{source.limit}"
        )

    def rows(self) -> Iterator[SourceRow]:
        """Yield the rows as they arrive; nothing is kept on disk."""
        for position, (own_id, content) in enumerate(islice(self._stream(), self.source.limit)):
            yield SourceRow(own_id or str(position), content)

    def _stream(self) -> Iterator[Read]:
        """Yield each row's own id and its content."""
        import datasets
        import yaml
        from datasets.exceptions import DatasetsError

        if self.endpoint is not None:
            # The library reads the endpoint only from its module; in this process it is always the same.
            datasets.config.HF_ENDPOINT = self.endpoint
        repo_id = f"hf://datasets/{self.source.repo_id}"
        with reading_hub(_what(self.source), SourceRefused, _FIELD, _CURE):
            try:
                with own_files_only(f"{repo_id}@{self.commit}/"), answers_needed(), no_archives():
                    builder = datasets.load_dataset_builder(
                        # The scheme keeps `datasets` from using a local folder of the same name.
                        repo_id,
                        name=self.source.config,
                        revision=self.commit,
                        token=self.token,
                    )
                yield from self._read(builder)
            except (DatasetsError, yaml.YAMLError, *_BROKEN) as error:
                fault = error if isinstance(error, DatasetsError) else repr(error)
                detail = f"{_what(self.source)} cannot be read: {fault}"[:1000]
                raise SourceRefused(detail, field=_FIELD, cure=_CURE) from error

    def _read(self, builder: Any) -> Iterator[Read]:  # noqa: ANN401 - of `datasets`
        from datasets.features.features import require_decoding

        if builder.name not in FORMS:
            detail = f"{_what(self.source)} is of the form {builder.name!r}, which is not read"
            raise SourceRefused(detail, field=_FIELD, cure="convert it to Parquet or JSONL")
        config = builder.config
        # In another encoding, rows are as `datasets` makes them.
        is_utf8 = builder.name == "json" and config.encoding == "utf-8"
        used = frozenset((*COLUMNS, *self.labels))
        if builder.name in ("arrow", "csv", "parquet"):
            cast = builder._cast_table  # to the dataset's types, where no name is another's
            again = ".1" if builder.name == "csv" else ""  # what `pandas` adds to a second one
            builder._cast_table = lambda table: cast(self._of_single_names(table, used, again))
        try:
            if is_utf8 and self.source.split in (config.data_files or ()):
                yield from self._json_rows(config)
                return
            with no_archives():
                stream = builder.as_streaming_dataset(split=self.source.split)
            if stream.features is not None and require_decoding(stream.features):
                # A row may name an image or audio file by any path or URL, so it is not opened.
                stream = stream.decode(False)
            if stream.column_names is not None:
                stream = stream.select_columns(used_columns(stream.column_names, self.labels))
            schema = stream.features.arrow_schema if stream.features is not None else None
            yield from (read_columns(row, schema, self.labels) for row in stream)
        except OSError as error:
            # No call of the system failed: bz2 and Parquet name a broken file so. A download names a short
            # transfer so, too, but files are streamed.
            if type(error) is OSError and error.errno is None:
                raise ValueError(f"a file is broken: {error}") from error
            raise

    def _of_single_names(self, table: pa.Table, used: Collection[str], again: str) -> pa.Table:
        """Return a file's table. Raises SourceRefused for a name that is there twice: either may be meant."""
        if (name := name_twice(table.schema, used, again)) is not None:
            detail = f"{_what(self.source)} has several columns or members {name!r} in a file"
            detail += f", or one {name + again!r} beside it" if again else ""
            raise SourceRefused(detail, field=_FIELD, cure="rename all but one")
        return table

    def _json_rows(self, config: Any) -> Iterator[Read]:  # noqa: ANN401 - of `datasets`
        """Read JSON as it is written: each file has an object on each line, or is one document.

        `datasets` fixes the types of columns by the first 10 MB, and makes other text of what differs later.
        """
        from datasets import DownloadConfig, StreamingDownloadManager
        from datasets.utils.file_utils import xopen

        access = DownloadConfig(token=self.token)
        manager = StreamingDownloadManager(download_config=access)
        with no_archives():
            places = manager.extract(list(config.data_files[self.source.split]))
        for path in manager.iter_files(places):
            with xopen(path, "rb", download_config=access) as opened, BufferedReader(opened, 2**20) as file:
                lines = (text for line in file if (text := line.strip()))
                first = next(lines, b"[]")
                if first.startswith(UTF_16):
                    detail = f"{_what(self.source)} has a file in UTF-16, and its card does not say so"
                    raise SourceRefused(detail, field=_FIELD, cure="give 'encoding: utf-16' in its card")
                if config.field is None and _is_object(first):
                    yield from (read_line(line, self.labels) for line in chain((first,), lines))
                    continue
                value = json.loads(b"\n".join((first, *lines)), object_pairs_hook=_object)
            if config.field is not None:
                if isinstance(value, RowReject):
                    detail = f"{_what(self.source)} has a file in which {value.detail}"
                    raise SourceRefused(detail, field=_FIELD, cure="leave out all but one there")
                value = value[config.field]
            for row in value if isinstance(value, list) else [value]:
                if (reject := _reject_in(row)) is not None:
                    yield None, reject
                else:
                    yield read_row({"text": row} if isinstance(row, str) else row, self.labels)


def _is_object(line: bytes) -> bool:
    """Return whether a line is a whole object of JSON."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any] | RowReject:
    """Return an object of a document, of which a key that it has twice rejects only the row."""
    try:
        return json_object(pairs)
    except RejectedError as error:
        return error.reject


def _reject_in(value: object) -> RowReject | None:
    """Return what rejects a row of a document, which may be nested as deep as `json` reads."""
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, RowReject):
            return held
        inside = held.values() if isinstance(held, dict) else held if isinstance(held, list) else ()
        waiting += (part for part in inside if isinstance(part, dict | list | RowReject))
    return None


@contextmanager
def own_files_only(repository: str) -> Iterator[None]:
    """Make `datasets` look for files only below `repository`.

    Raises SourceRefused if the dataset's metadata makes it look elsewhere: on this node, in another
    repository or on another host.
    """
    from datasets import data_files
    from datasets.exceptions import DataFilesNotFoundError

    resolve_pattern = data_files.resolve_pattern

    def resolve_own(pattern: str, base_path: str, *options: object, **named: object) -> list[str]:
        _check_own(repository, f"{base_path}/", pattern)
        try:
            files: list[str] = resolve_pattern(pattern, base_path, *options, **named)
        except FileNotFoundError as error:  # otherwise `datasets` names a folder of this node, too
            raise DataFilesNotFoundError(str(error)) from error
        _check_own(repository, *files)
        return files

    data_files.resolve_pattern = resolve_own
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve_pattern


def _check_own(repository: str, *names: str) -> None:
    """Refuse anything that `datasets` or `fsspec` might not treat as a path inside the repository.

    `::` chains file systems: the one after it is opened first.
    """
    from datasets.utils.file_utils import is_relative_path

    for path in (name.removeprefix(repository) for name in names):
        if not is_relative_path(path) or "://" in path or "::" in path or ".." in path.split("/"):
            detail = f"the dataset names {path[:300]!r}, which is outside its repository"
            cure = "name the dataset's files by paths relative to its repository, without '..'"
            raise SourceRefused(detail, field=_FIELD, cure=cure)


@contextmanager
def answers_needed() -> Iterator[None]:
    """Make `datasets` raise what kept the Hub from giving it a file of metadata, such as a 503.

    It would say that the dataset is missing, or go on as if the file were, and so read other data files.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalEntryNotFoundError

    download = HfApi.hf_hub_download

    def download_answered(api: HfApi, *options: Any, **named: Any) -> object:  # noqa: ANN401
        try:
            return download(api, *options, **named)
        except LocalEntryNotFoundError as error:  # a FileNotFoundError
            raise error.__cause__ or ConnectionError(str(error)) from None

    HfApi.hf_hub_download = download_answered
    try:
        yield
    finally:
        HfApi.hf_hub_download = download


@contextmanager
def no_archives() -> Iterator[None]:
    """Make `datasets` refuse Zip archives by raising SourceRefused, as files on this node are refused.

    It finds the files in one by their names, and chains those with other places by `::`.
    """
    from datasets import StreamingDownloadManager

    extract = StreamingDownloadManager._extract

    def extract_file(manager: Any, packed: str) -> str:  # noqa: ANN401 - of `datasets`
        path: str = extract(manager, packed)
        if path.startswith("zip://"):
            detail = f"{PurePosixPath(packed).name!r} of the dataset is a Zip archive, which is not read"
            raise SourceRefused(detail, field=_FIELD, cure="push its files to the dataset themselves")
        return path

    StreamingDownloadManager._extract = extract_file
    try:
        yield
    finally:
        StreamingDownloadManager._extract = extract


def _what(source: HubSource) -> str:
    return f"dataset {source.repo_id!r}, split {source.split!r}"
