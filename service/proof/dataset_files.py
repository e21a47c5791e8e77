"""The files of a dataset that is verified: a folder, or a repository of which a unit at a time is fetched."""

import resource
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from service.errors import OptionRefused
from service.plan.hub_reading import reading_hub
from service.settings import Settings


class LocalDataset:
    """A folder in the layout of its Hub repository."""

    def __init__(self, folder: Path) -> None:
        """Look below `folder`."""
        self._folder = folder

    def paths(self) -> list[str]:
        """Return the paths of all files, sorted. Hidden folders at the top belong to tools."""
        paths = (path.relative_to(self._folder) for path in self._folder.rglob("*") if path.is_file())
        return sorted(path.as_posix() for path in paths if not path.parts[0].startswith("."))

    @contextmanager
    def held(self, paths: Iterable[str]) -> Iterator[Path]:
        """Yield the folder that holds those of the files that exist."""
        yield self._folder


class HubDataset:
    """A repository at one commit. What is held lies in a scratch folder until it is let go."""

    def __init__(self, repo_id: str, settings: Settings, scratch: Path) -> None:
        """Ask the Hub for the commit and its files. Raises OptionRefused, HubUnavailable."""
        from huggingface_hub import HfApi

        self._repo_id, self._settings, self._scratch = repo_id, settings, scratch
        api = HfApi(settings.hub_endpoint, token=settings.token())
        with self._reading():
            info = api.dataset_info(repo_id)
        self._commit = info.sha
        self._paths = sorted(file.rfilename for file in info.siblings or ())

    def paths(self) -> list[str]:
        """Return the paths of all files, sorted."""
        return [path for path in self._paths if not path.startswith(".")]

    @contextmanager
    def held(self, paths: Iterable[str]) -> Iterator[Path]:
        """Fetch those of the files that exist; remove them when the block ends.

        Raises HubUnavailable, DiskFull.
        """
        from huggingface_hub import hf_hub_download

        there = sorted(set(paths) & set(self._paths))
        try:
            for path in there:
                with self._reading():
                    hf_hub_download(
                        self._repo_id,
                        path,
                        repo_type="dataset",
                        revision=self._commit,
                        local_dir=self._scratch,
                        endpoint=self._settings.hub_endpoint,
                        token=self._settings.token(),
                    )
            yield self._scratch
        finally:
            for path in there:
                (self._scratch / path).unlink(missing_ok=True)

    def _reading(self) -> AbstractContextManager[None]:
        cure = "check the name and the token's rights"
        return reading_hub(f"dataset {self._repo_id}", OptionRefused, "repo_id", cure)


DatasetFiles = LocalDataset | HubDataset


@contextmanager
def memory_bound(num_bytes: int) -> Iterator[None]:
    """Let the process take at most so much more memory of its own in the block, then it is a MemoryError.

    A few bytes of Parquet can say that they decode to terabytes, and only the allocation can be asked.
    """
    data_kib = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = int(data_kib) * 1024 + num_bytes
    with suppress(ValueError):  # a lower hard limit holds already
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
