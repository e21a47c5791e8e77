"""Read access to a dataset's files: a folder, or a Hub repository at one commit.

Files can be listed, opened for byte ranges, or held whole in a folder. Paths are relative to the dataset.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from schemas.dataset.entries import FileEntry
from schemas.dataset.errors import DatasetError
from schemas.dataset.files import LocalFile, RangeFile, arrow_file
from schemas.dataset.memory import Bytes
from schemas.names import MANIFEST_FOLDER, is_inside, is_manifest
from service.artifacts.hub_client import reading_hub
from service.errors import OptionRefused

HUB_PREFIX = "hf://datasets/"
SMALL_BYTES = 2**27
"""Maximum size of a table of jobs, a card or a final norm."""
MANIFEST_BYTES = 2**30
"""Maximum size of a manifest, which lists every shard and reject: 100,000 shards of five layers and a million
rejects take a third of it. Listing fewer rejects would not suffice: so many shards of many layers exceed
`SMALL_BYTES` alone.
"""


class Opens(Protocol):
    """Something that opens the files of a dataset, or some of them."""

    def open(self, path: str, *, direct: bool = False) -> RangeFile:
        """Open a file; with `direct`, a local one is read past the page cache. Raises DatasetError."""


class LocalFiles:
    """A folder in the layout of a dataset repository."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.name = folder, str(folder)
        self.revision = None

    def paths(self) -> list[str]:
        """Return the paths of all files, sorted, without hidden entries at the top, which belong to tools.

        Folders that are links are followed, as whoever opens a file does. Raises OSError if a folder cannot
        be listed: nothing is known of its files.
        """
        found, top = list[Path](), self._folder.resolve()
        for where, folders, names in os.walk(top, onerror=_unless_gone, followlinks=True):
            folder = Path(where)
            if folder == top:
                folders[:], names = ([name for name in part if name[0] != "."] for part in (folders, names))
            elif folder.is_symlink() and folder.resolve() in map(Path.resolve, folder.parents):
                folders.clear()  # a link to a folder above it would never end
                continue
            found += [folder / name for name in names]
        return sorted(path.relative_to(top).as_posix() for path in found if path.is_file())

    def manifests(self) -> list[str]:
        """Return the paths of the manifests, sorted. Raises OSError if their folder cannot be listed."""
        folder = self._folder / MANIFEST_FOLDER
        try:
            names = [path.name for path in folder.iterdir() if not path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(filter(is_manifest, (f"{MANIFEST_FOLDER}/{name}" for name in names)))

    def open(self, path: str, *, direct: bool = False) -> LocalFile:
        """Open a file as a `LocalFile`. Raises DatasetError."""
        file = self._folder / path
        if file.is_fifo():
            raise DatasetError(f"{path} cannot be opened: it is a pipe, which may never answer")
        if file.is_dir():
            raise DatasetError(f"{path} cannot be opened: it is a folder")
        try:
            return LocalFile(file, direct=direct)
        except OSError as error:
            raise DatasetError(f"{path} cannot be opened: {error.strerror}") from error

    @contextmanager
    def held(self, paths: Iterable[str]) -> Iterator[Path]:
        """Yield the folder with the existing ones of these files."""
        yield self._folder


class HubFiles:
    """A dataset repository, pinned to one commit.

    If that commit goes, since the history is rewritten (`super_squash_history`), files that are open, and
    those that `open_named` opens, are read from the newest one, as long as that has the same content under
    their paths; not those that are `held`.
    """

    def __init__(
        self,
        repo_id: str,
        revision: str | None = None,
        *,
        endpoint: str | None = None,
        token: str | None = None,
    ) -> None:
        """Resolve `revision` to a commit. Its files are listed later: this answer leaves some of many out.

        Endpoint and token default to the Hub client's own. Held files are in the system's temporary folder.
        Raises OptionRefused, HubUnavailable.
        """
        from huggingface_hub import HfApi, HfFileSystem

        self._repo_id, self.name = repo_id, f"dataset {repo_id}"
        self._given: dict[str, Any] = {"endpoint": endpoint, "token": token}
        with self._reading():
            info = HfApi(**self._given).dataset_info(repo_id, revision=revision)
        self.revision = info.sha
        # An instance that is shared would keep the listings of every commit that a follower looks at.
        self._fs = HfFileSystem(**self._given, skip_instance_cache=True)
        self._names: dict[str, dict[str, str]] = {}
        """What `names` returns, by folder."""
        self._newer: HubFiles | None = None

    def paths(self) -> list[str]:
        """Return the paths of all files, sorted."""
        return sorted(path for path in self._paths if not path.startswith("."))

    def has(self, path: str) -> bool:
        """Return whether the commit has a file. Raises OptionRefused, HubUnavailable."""
        return self._content(path) is not None

    def manifests(self) -> list[str]:
        """Return the paths of the manifests, sorted. Raises OptionRefused, HubUnavailable."""
        return sorted(filter(is_manifest, self.names(MANIFEST_FOLDER)))

    def names(self, folder: str) -> dict[str, str]:
        """Return the sha256, or git's name, of the files directly in `folder`, by path.

        Raises OptionRefused, HubUnavailable.
        """
        if folder not in self._names:
            root = f"datasets/{self._repo_id}@{self.revision}/"
            with self._reading():
                try:
                    # Older clients keep what they have of a listing that broke off, and return that next.
                    found = self._fs.ls(f"{root}{folder}".rstrip("/"), detail=True, refresh=True)
                except FileNotFoundError as error:
                    if error.__cause__ is not None:  # the repository itself
                        raise
                    found = []
            self._names[folder] = {
                file["name"].removeprefix(root): file["lfs"].sha256 if file["lfs"] else file["blob_id"]
                for file in found
                if file["type"] == "file"
            }
        return self._names[folder]

    def open(self, path: str, *, direct: bool = False) -> "HubFile":
        """Open a file to be read with range requests. Raises DatasetError, and as `has` does."""
        content = self._content(path)
        if content is None:
            raise DatasetError(f"{path} cannot be opened: it is not in {self._repo_id}")
        where = f"datasets/{self._repo_id}@{self.revision}/{path}"
        return HubFile(self._fs, where, content, partial(self.in_newer, path, content))

    @contextmanager
    def held(self, paths: Iterable[str]) -> Iterator[Path]:
        """Fetch the existing ones of these files into a folder, which is removed when the context ends.

        Raises OptionRefused, HubUnavailable, DiskFull.
        """
        from huggingface_hub import hf_hub_download

        with tempfile.TemporaryDirectory(prefix="quarry-") as folder:
            for path in sorted(self._paths.intersection(paths)):
                with self._reading():
                    hf_hub_download(
                        self._repo_id,
                        path,
                        repo_type="dataset",
                        revision=self.revision,
                        local_dir=folder,
                        **self._given,
                    )
            yield Path(folder)

    def in_newer(self, path: str, content: str) -> "HubFile | None":
        """Return the file with this content in the newest commit, unless that is this one or lacks it."""
        if self._newer is None:
            newest = HubFiles(self._repo_id, **self._given)
            if newest.revision == self.revision:
                return None
            self._newer = newest
        try:
            there = self._newer._content(path)
        except OptionRefused:  # it is gone, too
            return self._newer.in_newer(path, content)
        return self._newer.open(path) if there == content else None

    def _content(self, path: str) -> str | None:
        return self.names(path.rpartition("/")[0]).get(path)

    @cached_property
    def _paths(self) -> frozenset[str]:
        from huggingface_hub import HfApi

        with self._reading():
            api, where = HfApi(**self._given), {"revision": self.revision, "repo_type": "dataset"}
            return frozenset(api.list_repo_files(self._repo_id, **where))

    def _reading(self) -> AbstractContextManager[None]:
        cure = "check the name, the revision and the token's rights"
        return reading_hub(self.name, OptionRefused, "repo_id", cure)


Files = LocalFiles | HubFiles


def _unless_gone(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed, unless it was just removed."""
    if not isinstance(error, FileNotFoundError):
        raise error


class HubFile:
    """A file of a repository, read with range requests."""

    def __init__(
        self,
        fs: Any,  # noqa: ANN401 - huggingface_hub is imported late
        path: str,
        content: str,
        in_newer: Callable[[], "HubFile | None"],
    ) -> None:
        """Take the file `path`, listed with `content`; `in_newer` finds it again if the Hub refuses it."""
        self._fs, self._path, self._in_newer = fs, path, in_newer
        self.sha256 = content if len(content) == 64 else None
        """None for a short file, which git names by another digest."""

    def arrow(self) -> Any:  # noqa: ANN401
        """Return a file object that reads ranges with limited read-ahead."""
        return arrow_file(self, 2**20)

    @cached_property
    def num_bytes(self) -> int:
        """The file's length. Raises OptionRefused, HubUnavailable."""
        return int(self._ask(lambda path: self._fs.info(path))["size"])

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Fetch one range. Raises OptionRefused, HubUnavailable, EOFError if the file ends before it."""
        end = offset + num_bytes
        # Left to itself it fetches 5 MiB behind each range.
        data = self._ask(lambda path: self._fs.cat_file(path, start=offset, end=end, cache_type="none"))
        if len(data) != num_bytes:
            raise EOFError(f"the file has no {num_bytes} bytes at {offset}")
        return np.frombuffer(bytearray(data), np.uint8)

    def _ask(self, do: Callable[[str], Any]) -> Any:  # noqa: ANN401
        try:
            with reading_hub(
                self._path, OptionRefused, "repo_id", "check the revision and the token's rights"
            ):
                return do(self._path)
        except OptionRefused:
            newer = self._in_newer()
            if newer is None:
                raise
        self._path, self._in_newer = newer._path, newer._in_newer
        return self._ask(do)


def repository_of(where: str) -> str:
    """Return what is behind `hf://datasets/`, without a slash at its end, which a folder's name may have."""
    return where.removeprefix(HUB_PREFIX).removesuffix("/")


def files_of(where: str | os.PathLike[str], revision: str | None = None) -> Files:
    """Return the files of a folder, or of a dataset repository named `hf://datasets/NAMESPACE/NAME`.

    `revision` is a branch, tag or commit of the repository. Raises DatasetError, OptionRefused,
    HubUnavailable.
    """
    if isinstance(where, str) and where.startswith(HUB_PREFIX):
        return HubFiles(repository_of(where), revision)
    folder = Path(where)
    if revision is not None:
        raise DatasetError(f"revision {revision!r} is of a repository, and {where} is none: leave it out")
    if where == "" or not folder.is_dir():  # an empty name would be the current folder
        cure = f"a repository is named {HUB_PREFIX}NAMESPACE/NAME"
        raise DatasetError(f"{where or repr(where)} is not a folder; {cure}")
    return LocalFiles(folder)


def read_file(files: Files, path: str, max_bytes: int = SMALL_BYTES) -> bytes:
    """Return the content of a small file of a dataset. Raises DatasetError, and as `open` and `read` do."""
    file = files.open(path)
    if file.num_bytes > max_bytes:
        raise DatasetError(f"{path} has {file.num_bytes} bytes; a file of its kind has at most {max_bytes}")
    return file.read(0, file.num_bytes).tobytes()


def open_named(files: Opens, entry: FileEntry, *, direct: bool = False) -> RangeFile:
    """Open a file that a manifest names.

    Raises DatasetError if it is outside the dataset, or of another length or, as the Hub lists it, sha256.
    """
    if not is_inside(entry.path):
        raise DatasetError(f"a manifest names {entry.path!r}, a path that leaves the dataset")
    file: RangeFile | None
    try:
        file = files.open(entry.path, direct=direct)
    except OptionRefused:
        file = files.in_newer(entry.path, entry.sha256) if isinstance(files, HubFiles) else None
        if file is None:
            raise
    if file.num_bytes != entry.bytes:
        raise DatasetError(f"{entry.path} has {file.num_bytes} bytes, its manifest says {entry.bytes}")
    if isinstance(file, HubFile) and file.sha256 not in (None, entry.sha256):
        raise DatasetError(f"{entry.path} has sha256 {file.sha256}, its manifest says {entry.sha256}")
    return file
