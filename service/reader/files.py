"""Where a dataset's files are: a folder, or a repository on the Hub. Both give byte ranges."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.dataset.files import LocalFile
from schemas.dataset.manifest import FileEntry
from schemas.dataset.memory import Bytes
from schemas.names import is_inside
from service.reader.errors import ReaderError

HUB_PREFIX = "hf://datasets/"


def read_file(files: "Files", path: str) -> bytes:
    """Return a small file of a dataset whole. Raises ReaderError, OSError."""
    file = files.open(path)
    return file.read(0, file.num_bytes).tobytes()


def open_named(files: "Files", entry: FileEntry, *, direct: bool = False) -> "LocalFile | HubFile":
    """Open a file that a manifest names. Raises ReaderError for a path outside or for another length."""
    if not is_inside(entry.path):
        raise ReaderError(f"a manifest names {entry.path!r}, a path that leaves the dataset")
    file = files.open(entry.path, direct=direct)
    if file.num_bytes != entry.bytes:
        raise ReaderError(f"{entry.path} has {file.num_bytes} bytes, its manifest says {entry.bytes}")
    return file


def files_of(where: str | os.PathLike[str], revision: str | None = None) -> "Files":
    """Return the files of a folder, or of a dataset repository named `hf://datasets/NAMESPACE/NAME`.

    `revision` is a branch, tag or commit of the repository. Raises ReaderError.
    """
    if isinstance(where, str) and where.startswith(HUB_PREFIX):
        return HubFiles(where.removeprefix(HUB_PREFIX), revision)
    folder = Path(where)
    if not folder.is_dir():
        raise ReaderError(f"{where} is no folder; a repository is named {HUB_PREFIX}NAMESPACE/NAME")
    return LocalFiles(folder)


class LocalFiles:
    """A folder. Paths are those inside the dataset."""

    def __init__(self, folder: Path) -> None:
        """Look below `folder`."""
        self._folder = folder

    def find(self, folder: str, suffix: str) -> list[str]:
        """Return the paths directly in `folder` that end in `suffix`, sorted."""
        paths = (self._folder / folder).glob(f"*{suffix}")
        return sorted(path.relative_to(self._folder).as_posix() for path in paths)

    def open(self, path: str, *, direct: bool = False) -> LocalFile:
        """Open a file, to be read as `LocalFile` says. Raises ReaderError."""
        try:
            return LocalFile(self._folder / path, direct=direct)
        except OSError as error:
            raise ReaderError(f"{path} cannot be opened: {error.strerror}") from error


class HubFiles:
    """A dataset repository, pinned to one commit. Needs huggingface_hub."""

    def __init__(self, repo_id: str, revision: str | None) -> None:
        """Ask the Hub which commit `revision` is. Raises ReaderError."""
        try:
            from huggingface_hub import HfApi, HfFileSystem
            from huggingface_hub.errors import HfHubHTTPError
        except ImportError as error:
            raise ReaderError("reading from the Hub needs the package huggingface_hub") from error
        try:
            commit = HfApi().dataset_info(repo_id, revision=revision).sha
        except (HfHubHTTPError, OSError) as error:
            raise _unread(f"the dataset {repo_id}", error) from error
        self._root = f"datasets/{repo_id}@{commit}/"
        self._fs: Any = HfFileSystem()

    def find(self, folder: str, suffix: str) -> list[str]:
        """Return the paths directly in `folder` that end in `suffix`, sorted."""
        paths = self._fs.glob(f"{self._root}{folder}/*{suffix}")
        return sorted(str(path).split("/", 3)[3] for path in paths)

    def open(self, path: str, *, direct: bool = False) -> "HubFile":
        """Name a file; nothing is read yet."""
        return HubFile(self._fs, self._root + path)


Files = LocalFiles | HubFiles


class HubFile:
    """A file of a repository, read by range requests."""

    def __init__(self, fs: Any, path: str) -> None:  # noqa: ANN401 - huggingface_hub is not imported here
        """Hold the file system and the path."""
        self._fs, self._path = fs, path

    def arrow(self) -> Any:  # noqa: ANN401
        """Return a file object that reads ranges; what is read ahead is bounded."""
        return pa.PythonFile(self._fs.open(self._path, block_size=2**20), mode="r")

    @cached_property
    def num_bytes(self) -> int:
        """The file's length. Raises ReaderError."""
        try:
            return int(self._fs.info(self._path)["size"])
        except OSError as error:
            raise _unread(self._path, error) from error

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Fetch one range. Raises ReaderError, EOFError if the file ends before it."""
        try:
            data = self._fs.cat_file(self._path, start=offset, end=offset + num_bytes)
        except OSError as error:
            raise _unread(self._path, error) from error
        if len(data) != num_bytes:
            raise EOFError(f"the file has no {num_bytes} bytes at {offset}")
        return np.frombuffer(bytearray(data), np.uint8)


def _unread(what: str, error: OSError) -> ReaderError:
    """Return the error of what the Hub does not give, without its client's words: they quote the request."""
    answer = getattr(error, "response", None)
    why = type(error).__name__ if answer is None else f"the Hub answered {answer.status_code}"
    return ReaderError(f"{what} cannot be read: {why}")
