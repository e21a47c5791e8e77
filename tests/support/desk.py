"""A Hub, a real client process, and two finished jobs: what every test of pushing begins with."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_hub import FakeHub
from tests.support.hub_client import HubClient, Mode
from tests.support.hub_state import Blob, Repo, Token, large_blob, regular_blob

REPO = "org/states"
TOKEN = "hf_may_write"
READ_TOKEN = "hf_may_read"


@contextmanager
def writable_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Start a Hub in `folder` whose `TOKEN` may write to `REPO`; this process's client has its home there."""
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    with FakeHub(cas=folder / "cas") as hub:
        hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        yield hub


@dataclass(frozen=True)
class Desk:
    """A Hub, the client process that talks to it, and the folders of two finished jobs of one model."""

    hub: FakeHub
    client: HubClient
    mode: Mode
    dataset: Path
    other: Path

    def push(self, folder: Path | None = None, token: str = TOKEN, **hub: Any) -> dict[str, Any]:
        target = {"repo_id": REPO} | hub
        return self.client.ask(
            "push", folder=str(folder or self.dataset), endpoint=self.hub.url, token=token, hub=target
        )

    @property
    def repo(self) -> Repo:
        return self.hub.repo(REPO)

    def titles(self) -> list[str]:
        return [commit.title for commit in self.repo.commits[1:]]

    def pushed(self) -> dict[str, str]:
        """Return the etag of every file that was pushed: the sha256 of large ones, the blob id of others."""
        return {path: blob.etag for path, blob in self.repo.head.tree.items() if path != ".gitattributes"}


def committed(folder: Path) -> dict[str, Blob]:
    """Return a folder's files as a commit of another client, which is in LFS mode, holds them."""
    found = {}
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            large = file.suffix in (".parquet", ".safetensors")
            digest = hashlib.sha256(content).hexdigest()
            blob = large_blob(digest, len(content), content) if large else regular_blob(content)
            found[file.relative_to(folder).as_posix()] = blob
    return found


def etags(folder: Path) -> dict[str, str]:
    """Return what `Desk.pushed` should say of a folder."""
    return {path: blob.etag for path, blob in committed(folder).items()}
