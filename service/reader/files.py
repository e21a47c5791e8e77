"""Where a dataset's files are: a folder, or a repository on the Hub. Both give byte ranges.

Only the ranges that are asked for are read, so that one layer of a dataset costs one layer's bytes.
"""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch

from service.reader.errors import ReaderError

HUB_PREFIX = "hf://datasets/"
_BUFFERS_AT_ONCE = 1024
"""Linux takes no more in one call (IOV_MAX)."""
_SCATTERED_BYTES = 1024
"""Shorter rows are copied to their places: a buffer of its own for each would cost more than the copy."""


class RangeFile(Protocol):
    """An open file, read at any place; safe to use from several threads."""

    def read_into(self, out_TW: torch.Tensor, offset: int) -> None:
        """Fill `out_TW`, uint8 [T, W], from `offset` on; its T rows may lie apart, each is contiguous.

        Raises ReaderError if the file is shorter.
        """

    def arrow(self) -> Any:  # noqa: ANN401 - what pyarrow opens
        """Return something that `pyarrow.parquet` reads from."""


class Files(Protocol):
    """A dataset's files by their paths inside it."""

    def find(self, folder: str, suffix: str) -> list[str]:
        """Return the paths below `folder` that end in `suffix`, sorted."""

    def open(self, path: str) -> RangeFile:
        """Open a file. Raises ReaderError."""

    def read(self, path: str) -> bytes:
        """Return a small file whole. Raises ReaderError."""


def files_of(where: str | os.PathLike[str], revision: str | None = None) -> Files:
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
    """A folder."""

    def __init__(self, folder: Path) -> None:
        """Look below `folder`."""
        self._folder = folder

    def find(self, folder: str, suffix: str) -> list[str]:
        """Return the paths below `folder` that end in `suffix`, sorted."""
        found = (self._folder / folder).rglob(f"*{suffix}")
        return sorted(path.relative_to(self._folder).as_posix() for path in found)

    def open(self, path: str) -> "LocalFile":
        """Open a file. Raises ReaderError."""
        return LocalFile(self._folder / path)

    def read(self, path: str) -> bytes:
        """Return a small file whole. Raises ReaderError."""
        try:
            return (self._folder / path).read_bytes()
        except OSError as error:
            raise ReaderError(f"{path} cannot be read: {error.strerror}") from error


class LocalFile:
    """A file on this machine; closed when nobody holds it."""

    def __init__(self, path: Path) -> None:
        """Raises ReaderError."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReaderError(f"{path} cannot be opened: {error.strerror}") from error

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def arrow(self) -> str:
        """Return the path."""
        return str(self._path)

    def read_into(self, out_TW: torch.Tensor, offset: int) -> None:
        """Read straight into the tensor's memory, pinned or not, its rows side by side or apart."""
        if out_TW.is_contiguous():
            self._read([bytes_of(out_TW)], offset)
        elif out_TW.shape[1] < _SCATTERED_BYTES:
            together_TW = torch.empty(out_TW.shape, dtype=torch.uint8)
            self._read([bytes_of(together_TW)], offset)
            out_TW.copy_(together_TW)
        else:
            rows = _rows_of(out_TW)
            for begin in range(0, len(rows), _BUFFERS_AT_ONCE):
                some = rows[begin : begin + _BUFFERS_AT_ONCE]
                self._read(some, offset + begin * out_TW.shape[1])

    def _read(self, buffers: list[memoryview], offset: int) -> None:
        left = sum(map(len, buffers))
        while left:
            count = os.preadv(self._fd, buffers, offset)
            if count == 0:
                raise ReaderError(f"{self._path} ends at byte {offset}: it is truncated")
            offset, left = offset + count, left - count
            if left:
                buffers = _after(buffers, count)

    def mapped(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return bytes as they lie in the page cache: uint8 [num_bytes], no copy until they are written to.

        The map is private, so a write never reaches the file.
        """
        try:
            view = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
            return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes, offset=offset)
        except ValueError as error:
            raise ReaderError(
                f"{self._path} has no {num_bytes} bytes at {offset}: it is truncated"
            ) from error


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
            raise ReaderError(f"the dataset {repo_id} cannot be read: {error}") from error
        self._root = f"datasets/{repo_id}@{commit}/"
        self._fs: Any = HfFileSystem()

    def find(self, folder: str, suffix: str) -> list[str]:
        """Return the paths below `folder` that end in `suffix`, sorted."""
        found = self._fs.glob(f"{self._root}{folder}/**/*{suffix}")
        return sorted(str(path).split("/", 3)[3] for path in found)

    def open(self, path: str) -> "HubFile":
        """Name a file; nothing is read yet."""
        return HubFile(self._fs, self._root + path)

    def read(self, path: str) -> bytes:
        """Return a small file whole. Raises ReaderError."""
        try:
            content: bytes = self._fs.cat_file(self._root + path)
        except OSError as error:
            raise ReaderError(f"{path} cannot be read: {error}") from error
        return content


class HubFile:
    """A file of a repository, read by range requests."""

    def __init__(self, fs: Any, path: str) -> None:  # noqa: ANN401 - huggingface_hub is not imported here
        """Hold the file system and the path."""
        self._fs, self._path = fs, path

    def arrow(self) -> Any:  # noqa: ANN401
        """Return a file object that reads ranges; what is read ahead is bounded."""
        return pa.PythonFile(self._fs.open(self._path, block_size=2**20), mode="r")

    def read_into(self, out_TW: torch.Tensor, offset: int) -> None:
        """Fetch one range."""
        try:
            data = self._fs.cat_file(self._path, start=offset, end=offset + out_TW.numel())
        except OSError as error:
            raise ReaderError(f"{self._path} cannot be read: {error}") from error
        if len(data) != out_TW.numel():
            raise ReaderError(f"{self._path} has no {out_TW.numel()} bytes at {offset}: it is truncated")
        if len(data):
            out_TW.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(out_TW.shape))


def bytes_of(out: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, writable; the tensor must outlive it.

    By address, because torch gives its memory as a buffer only through numpy, which need not be installed.
    """
    return _memory(out.data_ptr(), out.nbytes)


def _rows_of(out_TW: torch.Tensor) -> list[memoryview]:
    """Return the memory of every row of uint8 [T, W]; the tensor must outlive it."""
    (num_rows, width), stride = out_TW.shape, out_TW.stride(0)
    whole = _memory(out_TW.data_ptr(), (num_rows - 1) * stride + width if num_rows else 0)
    return [whole[begin : begin + width] for begin in range(0, num_rows * stride, stride)]


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left to fill when the first `count` bytes are; something is."""
    at = 0
    while count >= len(buffers[at]):
        count -= len(buffers[at])
        at += 1
    return [buffers[at][count:], *buffers[at + 1 :]]
