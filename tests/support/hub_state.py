"""What a fake Hub holds: tokens, repositories, commits and files; and the faults that its endpoints meet."""

import hashlib
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import hf_xet
from huggingface_hub.utils._xet import get_xet_session

Kind = Literal["model", "dataset"]

LFS_SUFFIXES = (".parquet", ".safetensors", ".bin", ".arrow")
REGULAR_LIMIT_BYTES = 10 * 2**20


@dataclass(frozen=True, slots=True)
class Fault:
    """What the n-th call of an endpoint (from 1, since the fault was set) meets instead of its answer.

    With `status` it is refused unprocessed; with `drop` the answer breaks off before or after it took effect,
    the connection is reset before, or nothing is answered at all.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    drop: Literal["before", "after", "reset", "stall"] | None = None
    message: str = "injected"
    nth: int = 1
    times: int = 1


@dataclass(frozen=True, slots=True)
class Token:
    """A user access token. `orgs` maps an organization to the user's role there."""

    user: str
    role: Literal["read", "write", "fineGrained"] = "write"
    orgs: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def may_write(self, namespace: str) -> bool:
        if self.role == "fineGrained":
            return "repo.write" in self.scopes.get(namespace, ())
        member = namespace == self.user or self.orgs.get(namespace) in ("admin", "write", "contributor")
        return self.role == "write" and member


@dataclass(frozen=True, slots=True)
class Blob:
    """A file; a large one has a `sha256`. `content` is None when only the xet storage has the bytes."""

    size: int
    git_oid: str
    sha256: str | None
    content: bytes | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.git_oid

    def entry(self, path: str) -> dict[str, Any]:
        about: dict[str, Any] = {"type": "file", "path": path, "size": self.size, "oid": self.git_oid}
        if self.sha256:
            about["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
        return about


@dataclass(frozen=True, slots=True)
class Commit:
    oid: str
    title: str
    tree: dict[str, Blob]


@dataclass(slots=True)
class Repo:
    kind: Kind
    id: str
    private: bool
    commits: list[Commit]
    gated: bool = False

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.head
        return next((commit for commit in self.commits if commit.oid == revision), None)

    def add(self, title: str, changed: Mapping[str, Blob], deleted: Collection[str] = ()) -> Commit:
        before = self.head.tree if self.commits else {}
        tree = {path: blob for path, blob in before.items() if path not in deleted} | {**changed}
        oid = hashlib.sha1(f"{self.kind}{self.id}{len(self.commits)}{title}".encode()).hexdigest()
        self.commits.append(Commit(oid, title, tree))
        return self.head


def xet_bytes(cas: Path, xet_hash: str, size: int) -> bytes:
    """Return a file as the xet storage puts it together again."""
    session = get_xet_session()
    with tempfile.NamedTemporaryFile() as file:
        with session.new_file_download_group(endpoint=f"local://{cas}", token="xet") as group:
            group.start_download_file(hf_xet.XetFileInfo(xet_hash, size), file.name)
        return Path(file.name).read_bytes()


def is_large(path: str, size: int) -> bool:
    return path.endswith(LFS_SUFFIXES) or size > REGULAR_LIMIT_BYTES


def ignores(tree: Mapping[str, Blob], path: str) -> bool:
    """Say whether a repository's .gitignore has a path; its patterns are names of files and folders."""
    patterns = (tree[".gitignore"].content or b"").decode().split() if ".gitignore" in tree else []
    return any(fnmatch(part, one.rstrip("/")) for one in patterns for part in path.split("/"))


def regular_blob(content: bytes) -> Blob:
    header = f"blob {len(content)}\0".encode()
    return Blob(len(content), hashlib.sha1(header + content).hexdigest(), None, content)


def large_blob(sha256: str, size: int, content: bytes | None) -> Blob:
    return Blob(size, hashlib.sha1(f"pointer {sha256} {size}".encode()).hexdigest(), sha256, content)


def tree_entries(commit: Commit, root: str, *, recursive: bool) -> list[dict[str, Any]]:
    """Return files and folders below the folder `root`, or only those in it, as the Hub lists them."""
    below = root + "/" if root else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, blob in sorted(commit.tree.items()):
        if path.startswith(below):
            inner = path.removeprefix(below).split("/")
            for depth in range(1, len(inner)):
                folder = below + "/".join(inner[:depth])
                oid = hashlib.sha1(folder.encode()).hexdigest()
                entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": oid}
            entries[path] = blob.entry(path)
    return [e for e in entries.values() if recursive or "/" not in e["path"].removeprefix(below)]
