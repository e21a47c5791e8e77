"""Where a dataset's files are: a folder, or a repository on the Hub. Both give byte ranges.

Only the ranges that are asked for are read, so that one layer of a dataset costs one layer's bytes.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import pyarrow as pa
import torch

from service.reader.errors import ReaderError
from service.reader.vectors import read_rows

HUB_PREFIX = "hf://datasets/"
_SCATTERED_BYTES = 1024
"""Shorter rows are copied to their places: a buffer of its own for each would cost more than the copy."""
_BLOCK_BYTES = 4096
"""Places and lengths of what is read past the page cache are a multiple of it, the largest block of disks."""
_SECTOR_BYTES = 512
"""The smallest one: what addresses are a multiple of, and each of a tensor's rows if they lie apart."""
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


class RangeFile(Protocol):
    """An open file, read at any place; safe to use from several threads."""

    def read_into(self, out_TW: torch.Tensor, offset: int) -> None:
        """Fill `out_TW`, uint8 [T, W], from `offset` on; its T rows may lie apart, each is contiguous.

        Raises ReaderError if the file is shorter.
        """

    def expect(self, places: Iterable[tuple[int, int]]) -> None:
        """Hear which byte ranges, offset and length, are read next. Costs no memory and waits for nothing."""

    def arrow(self) -> Any:  # noqa: ANN401 - what pyarrow opens
        """Return something that `pyarrow.parquet` reads from."""


class Files(Protocol):
    """A dataset's files by their paths inside it."""

    def find(self, folder: str, suffix: str) -> list[str]:
        """Return the paths below `folder` that end in `suffix`, sorted."""

    def open(self, path: str, *, direct: bool = False) -> RangeFile:
        """Open a file; a local one is read past the page cache if `direct`. Raises ReaderError."""

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


def is_inside(path: str) -> bool:
    """Say whether a path that a dataset names stays inside it. Nothing in a dataset is trusted."""
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and "\0" not in path


class LocalFiles:
    """A folder."""

    def __init__(self, folder: Path) -> None:
        """Look below `folder`."""
        self._folder = folder

    def find(self, folder: str, suffix: str) -> list[str]:
        """Return the paths below `folder` that end in `suffix`, sorted."""
        found = (self._folder / folder).rglob(f"*{suffix}")
        return sorted(path.relative_to(self._folder).as_posix() for path in found)

    def open(self, path: str, *, direct: bool = False) -> "LocalFile":
        """Open a file; it is read past the page cache if `direct`. Raises ReaderError."""
        return LocalFile(self._folder / path, direct=direct)

    def outgrow_memory(self, paths: Iterable[str]) -> bool:
        """Say whether files are larger together than the memory that could keep them. Raises ReaderError."""
        try:
            return sum((self._folder / path).stat().st_size for path in paths) > _memory_bytes()
        except OSError as error:
            raise ReaderError(f"{error.filename} cannot be read: {error.strerror}") from error

    def read(self, path: str) -> bytes:
        """Return a small file whole. Raises ReaderError."""
        try:
            return (self._folder / path).read_bytes()
        except OSError as error:
            raise ReaderError(f"{path} cannot be read: {error.strerror}") from error


class LocalFile:
    """A file on this machine; closed when nobody holds it.

    With `direct`, whole blocks go by O_DIRECT from the disk to where they belong: the kernel copies nothing
    and keeps nothing. What does not begin and end on borders of blocks, and what a file system without
    O_DIRECT holds, is read as usual.
    """

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        """Raises ReaderError."""
        self._path = path
        self._direct_fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReaderError(f"{path} cannot be opened: {error.strerror}") from error
        if direct and hasattr(os, "O_DIRECT"):
            with suppress(OSError):
                self._direct_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        self._takes_direct = self._direct_fd is not None

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def arrow(self) -> str:
        """Return the path."""
        return str(self._path)

    def expect(self, places: Iterable[tuple[int, int]]) -> None:
        """Let the kernel begin to read ranges into the page cache."""
        if self._takes_direct or not hasattr(os, "posix_fadvise"):
            return
        for offset, num_bytes in places:
            # A hint: a file system that takes none is read without.
            with suppress(OSError):
                os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def read_into(self, out_TW: torch.Tensor, offset: int) -> None:
        """Read straight into the tensor's memory, pinned or not, its rows side by side or apart."""
        if out_TW.is_contiguous() or out_TW.shape[1] >= _SCATTERED_BYTES:
            end = read_rows(self._fd, out_TW, offset, done=self._past_the_cache(out_TW, offset))
        else:
            together_TW = torch.empty(out_TW.shape, dtype=torch.uint8, device="cpu")
            end = read_rows(self._fd, together_TW, offset)
            out_TW.copy_(together_TW)
        if end < out_TW.numel():
            raise ReaderError(f"{self._path} ends at byte {offset + end}: it is truncated")

    def _past_the_cache(self, out_TW: torch.Tensor, offset: int) -> int:
        """Read whole blocks by O_DIRECT if everything lies on its borders; return how many bytes that was."""
        if out_TW.is_contiguous():
            upto, border = out_TW.numel() // _BLOCK_BYTES * _BLOCK_BYTES, out_TW.data_ptr()
        else:
            upto, border = out_TW.numel(), out_TW.data_ptr() | out_TW.shape[1] | out_TW.stride(0)
        if (
            self._direct_fd is None
            or not self._takes_direct
            or offset % _BLOCK_BYTES
            or border % _SECTOR_BYTES
        ):
            return 0
        try:
            return read_rows(self._direct_fd, out_TW, offset, upto=upto)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Refused by the file system, or by a disk whose blocks are larger than a row.
            self._takes_direct = False
            return 0

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

    def open(self, path: str, *, direct: bool = False) -> "HubFile":
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

    def expect(self, places: Iterable[tuple[int, int]]) -> None:
        """Nothing: each range is fetched when it is read."""

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
    return memoryview((ctypes.c_char * out.nbytes).from_address(out.data_ptr())).cast("B")


def _memory_bytes() -> int:
    """Return the memory of this machine, or what the container may take of it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(_MEMORY_LIMIT.read_text()))
    except (OSError, ValueError):
        return machine
