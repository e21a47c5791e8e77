"""A Hub on loopback: the HTTP API that `huggingface_hub` and `datasets` speak, for models and datasets.

In LFS mode the uploaded bytes land here and their sha256 is checked. In xet mode the real Rust client stores
its chunks in a local folder (`casUrl: local://...`); the server then only knows sha256 and size, so a
test that downloads says with `know_xet` which xet hashes its files have, as the real storage would. With a
`XetStorage` the client uploads over HTTP, so that these calls can fail as well.

Every endpoint counts its calls and can be told to fail: `hub.fail("commit", Fault(status=503))`.
"""

import asyncio
import base64
import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs

import hf_xet
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.hub_answers import DROPS, Broken, Refusal
from tests.support.hub_state import (
    Blob,
    Commit,
    Fault,
    Kind,
    Repo,
    Token,
    ignores,
    is_large,
    large_blob,
    regular_blob,
    tree_entries,
    xet_bytes,
)
from tests.support.hub_storage import Handler, LfsStorage, XetStorage


class FakeHub:
    """The server, which closes no silent connection. Use it as a context manager; `url` is its endpoint."""

    def __init__(
        self,
        cas: Path | XetStorage | None = None,
        page_entries: int = 1000,
        lfs: LfsStorage | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        """Speak xet with the chunks in `cas` if given, otherwise to `lfs`; list by `page_entries`."""
        self.cas = cas
        self.page_entries = page_entries
        self.lfs = LfsStorage() if lfs is None else lfs
        self.tokens: dict[str, Token] = {}
        self.repos: dict[tuple[Kind, str], Repo] = {}
        self.calls: Counter[str] = Counter()
        self.paths_read: list[str] = []
        self.seen_authorizations: set[str] = set()
        self._xet_hashes: dict[str, str] = {}
        self._meanwhile: dict[str, Callable[[], object]] = {}
        self._faults: dict[str, list[tuple[int, Fault]]] = {}
        self._socket = socket.socket()
        self._socket.bind((address, 0))
        self._socket.listen(64)
        self.url = f"http://{address}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self._application(), log_level="critical", timeout_keep_alive=3600)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    # What tests say and ask.

    def add_token(self, value: str, token: Token) -> None:
        self.tokens[value] = token

    def add_repo(
        self, repo_id: str, files: Mapping[str, bytes] = {}, kind: Kind = "dataset", private: bool = False
    ) -> Repo:
        repo = self.repos[kind, repo_id] = Repo(kind, repo_id, private, [])
        blobs = {".gitattributes": regular_blob(b"*.parquet filter=lfs\n")}
        for path, content in files.items():
            digest = hashlib.sha256(content).hexdigest()
            blobs[path] = (
                large_blob(digest, len(content), content)
                if is_large(path, len(content))
                else regular_blob(content)
            )
        repo.add("initial commit", blobs)
        return repo

    def repo(self, repo_id: str, kind: Kind = "dataset") -> Repo:
        return self.repos[kind, repo_id]

    def fail(self, endpoint: str, fault: Fault) -> None:
        self._faults.setdefault(endpoint, []).append((self.calls[endpoint], fault))

    def meanwhile(self, endpoint: str, do: Callable[[], object]) -> None:
        """Do something just before the endpoint's next call is answered; others are answered meanwhile."""
        self._meanwhile[endpoint] = do

    def heal(self) -> None:
        self._faults.clear()

    def forget(self) -> None:
        """Lose all repositories, objects and faults."""
        self.repos.clear()
        self.lfs.forget()
        if isinstance(self.cas, XetStorage):
            self.cas.forget()
        self._faults.clear()
        self._meanwhile.clear()

    def know_xet(self, folder: Path) -> None:
        """Tell the xet hashes of the files below `folder`, by their sha256."""
        files = sorted(str(path) for path in folder.rglob("*") if path.is_file())
        for path, info in zip(files, hf_xet.hash_files(files), strict=True):
            self._xet_hashes[hashlib.sha256(Path(path).read_bytes()).hexdigest()] = info.hash

    # Routes.

    def _application(self) -> Starlette:
        api, git = "/api/{kind}/{ns}/{name}", "/{ns}/{name}"
        routes = [
            self._route("whoami", "/api/whoami-v2", self._whoami),
            self._route("create", "/api/repos/create", self._create, "POST"),
            self._route("validate", "/api/validate-yaml", self._validate, "POST"),
            self._route("info", api, self._info),
            self._route("info", api + "/revision/{rev:path}", self._info),
            self._route("auth_check", api + "/auth-check/write", self._auth_check),
            self._route("preupload", api + "/preupload/{rev}", self._preupload, "POST"),
            self._route("commit", api + "/commit/{rev}", self._commit, "POST"),
            self._route("tree", api + "/tree/{rev}", self._tree),
            self._route("tree", api + "/tree/{rev}/{path:path}", self._tree),
            self._route("paths_info", api + "/paths-info/{rev}", self._paths_info, "POST"),
            self._route("xet_write_token", api + "/xet-write-token/{rev}", self._xet_token),
            self._route("xet_read_token", api + "/xet-read-token/{rev}", self._xet_token),
            *self.lfs.routes(self._route),
        ]
        if isinstance(self.cas, XetStorage):
            routes += self.cas.routes(self._route)
        for prefix in ("/{kind:str}", ""):
            batch = prefix + git + ".git/info/lfs/objects/batch"
            routes.append(self._route("lfs_batch", batch, self._lfs_batch, "POST"))
            routes.append(self._route("resolve", prefix + git + "/resolve/{rev}/{path:path}", self._resolve))
        return Starlette(routes=routes)

    def _route(self, endpoint: str, path: str, handler: Handler, method: str = "GET") -> Route:
        async def answer(request: Request) -> Response:
            self.calls[endpoint] += 1
            if "authorization" in request.headers:
                self.seen_authorizations.add(request.headers["authorization"])
            if meanwhile := self._meanwhile.pop(endpoint, None):
                await asyncio.to_thread(meanwhile)
            fault = self._due_fault(endpoint)
            if fault and fault.status:
                return JSONResponse({"error": fault.message}, fault.status, dict(fault.headers))
            if fault and fault.drop in DROPS:
                await request.body()
                return DROPS[fault.drop]()
            try:
                response = await handler(request)
            except Refusal as refusal:
                response = refusal.response
            return Broken() if fault and fault.drop == "after" else response

        return Route(path, answer, methods=[method])

    def _due_fault(self, endpoint: str) -> Fault | None:
        for start, fault in self._faults.get(endpoint, []):
            if fault.nth <= self.calls[endpoint] - start < fault.nth + fault.times:
                return fault
        return None

    # Who asks, and for what.

    def _token(self, request: Request) -> Token | None:
        given = request.headers.get("authorization")
        if given is None:
            return None
        token = self.tokens.get(given.removeprefix("Bearer "))
        if token is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return token

    def _repo(self, request: Request, *, write: bool = False) -> Repo:
        kind: Kind = "dataset" if request.path_params.get("kind") == "datasets" else "model"
        repo_id = f"{request.path_params['ns']}/{request.path_params['name']}"
        token, repo = self._token(request), self.repos.get((kind, repo_id))
        mine = token is not None and (
            token.user == request.path_params["ns"] or request.path_params["ns"] in token.orgs
        )
        if repo is None or (repo.private and not mine):
            raise Refusal(404 if token else 401, "Repository not found", "RepoNotFound")
        if write and (token is None or not token.may_write(request.path_params["ns"])):
            raise Refusal(403, "Forbidden: you must use a write token to upload to a repository.")
        return repo

    def _at(self, request: Request) -> tuple[Repo, Commit]:
        repo = self._repo(request)
        commit = repo.at(request.path_params.get("rev", "main"))
        if commit is None:
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        return repo, commit

    def _is_uploaded(self, sha256: str, num_bytes: int) -> bool:
        if isinstance(self.cas, XetStorage):
            return self.cas.holds(sha256)
        return self.cas is not None or self.lfs.holds(sha256, num_bytes)

    def content(self, blob: Blob) -> bytes:
        if blob.content is not None:
            return blob.content
        if not isinstance(self.cas, Path) or blob.sha256 not in self._xet_hashes:
            raise Refusal(
                404, "the bytes are in xet storage, and no test said under which hash", "EntryNotFound"
            )
        return xet_bytes(self.cas, self._xet_hashes[blob.sha256], blob.size)

    # Endpoints.

    async def _whoami(self, request: Request) -> Response:
        token = self._token(request)
        if token is None:
            raise Refusal(401, "Invalid username or password.")
        access: dict[str, Any] = {"displayName": "test", "role": token.role}
        if token.role == "fineGrained":
            scoped = [
                {"entity": {"type": "org", "name": name}, "permissions": list(rights)}
                for name, rights in token.scopes.items()
            ]
            access["fineGrained"] = {"global": [], "scoped": scoped}
        orgs = [{"type": "org", "name": name, "roleInOrg": role} for name, role in token.orgs.items()]
        auth = {"type": "access_token", "accessToken": access}
        return JSONResponse({"type": "user", "name": token.user, "orgs": orgs, "auth": auth})

    async def _create(self, request: Request) -> Response:
        asked, token = await request.json(), self._token(request)
        namespace = asked["organization"] or (token.user if token else "")
        if token is None or not token.may_write(namespace):
            raise Refusal(403, "You don't have the rights to create a repository under this namespace")
        kind, repo_id = asked.get("type", "model"), f"{namespace}/{asked['name']}"
        about = {"url": f"{self.url}/{kind}s/{repo_id}"}
        if (kind, repo_id) in self.repos:
            return JSONResponse({"error": "You already created this repo", **about}, 409)
        self.add_repo(repo_id, kind=kind, private=asked.get("visibility") == "private")
        return JSONResponse(about)

    async def _validate(self, request: Request) -> Response:
        content = (await request.json())["content"]
        if not content.startswith("---\n"):
            return JSONResponse({"errors": [{"message": "no metadata"}], "warnings": []}, 400)
        return JSONResponse({"errors": [], "warnings": []})

    async def _info(self, request: Request) -> Response:
        repo, commit = self._at(request)
        listed = sorted(commit.tree.items())[: self.page_entries]  # of many files this answer leaves some out
        about = {
            "id": repo.id,
            "sha": commit.oid,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "siblings": [{"rfilename": path, "size": blob.size} for path, blob in listed],
            "lastModified": "2026-01-01T00:00:00.000Z",
        }
        return JSONResponse(about)

    async def _auth_check(self, request: Request) -> Response:
        self._repo(request, write=True)
        return JSONResponse({})

    async def _preupload(self, request: Request) -> Response:
        tree = self._repo(request, write=True).head.tree
        files = []
        for asked in (await request.json())["files"]:
            large = is_large(asked["path"], asked["size"])
            about = {
                "path": asked["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": ignores(tree, asked["path"]),
            }
            if asked["path"] in tree:
                about["oid"] = tree[asked["path"]].etag
            files.append(about)
        return JSONResponse({"files": files})

    async def _lfs_batch(self, request: Request) -> Response:
        self._repo(request, write=True)
        objects = []
        for asked in (await request.json())["objects"]:
            actions = self.lfs.actions(self.url, asked["oid"], asked["size"])
            objects.append({"oid": asked["oid"], "size": asked["size"], **actions})
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def _xet_token(self, request: Request) -> Response:
        self._repo(request, write="xet-write-token" in request.url.path)
        if self.cas is None:
            raise Refusal(404, "xet is not enabled for this repository")
        cas_url = self.url + self.cas.path if isinstance(self.cas, XetStorage) else f"local://{self.cas}"
        expires = int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": cas_url,
            "X-Xet-Access-Token": "xet",
            "X-Xet-Token-Expiration": str(expires),
        }
        return JSONResponse({"casUrl": cas_url, "accessToken": "xet", "exp": expires}, headers=headers)

    async def _commit(self, request: Request) -> Response:
        repo = self._repo(request, write=True)
        lines = [json.loads(line) for line in (await request.body()).splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit", repo.head.oid) != repo.head.oid:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        changed: dict[str, Blob] = {}
        deleted: list[str] = []
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                if value["path"] not in repo.head.tree:
                    raise Refusal(400, f"{value['path']} is not there to be deleted")
                deleted.append(value["path"])
            elif line["key"] == "file":
                changed[value["path"]] = regular_blob(base64.b64decode(value["content"]))
            else:
                if not self._is_uploaded(value["oid"], value["size"]):
                    raise Refusal(400, f"the bytes of {value['path']} were not uploaded")
                content = self.lfs.content(value["oid"])
                changed[value["path"]] = large_blob(value["oid"], value["size"], content)
        commit = repo.add(header["summary"], changed, deleted)
        url = f"{self.url}/{repo.kind}s/{repo.id}/commit/{commit.oid}"
        return JSONResponse(
            {"success": True, "commitOid": commit.oid, "commitUrl": url, "pullRequestUrl": None}
        )

    async def _tree(self, request: Request) -> Response:
        _, commit = self._at(request)
        root = request.path_params.get("path", "").strip("/")
        recursive = request.query_params.get("recursive", "false").lower() == "true"
        listed = tree_entries(commit, root, recursive=recursive)
        if root and not listed:
            raise Refusal(404, f"{root} does not exist", "EntryNotFound")
        start = int(request.query_params.get("cursor", "0"))
        headers = {}
        if start + self.page_entries < len(listed):
            following = request.url.include_query_params(cursor=start + self.page_entries)
            headers["Link"] = f'<{following}>; rel="next"'
        return JSONResponse(listed[start : start + self.page_entries], headers=headers)

    async def _paths_info(self, request: Request) -> Response:
        _, commit = self._at(request)
        found = []
        for path in parse_qs((await request.body()).decode()).get("paths", []):
            if path in commit.tree:
                found.append(commit.tree[path].entry(path))
            elif any(other.startswith(path + "/") for other in commit.tree):
                oid = hashlib.sha1(path.encode()).hexdigest()
                found.append({"type": "directory", "path": path, "size": 0, "oid": oid})
        return JSONResponse(found)

    async def _resolve(self, request: Request) -> Response:
        repo, commit = self._at(request)
        blob = commit.tree.get(request.path_params["path"])
        self.paths_read.append(request.path_params["path"])
        if blob is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        headers = {"ETag": f'"{blob.etag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if blob.sha256:
            headers |= {"X-Linked-Size": str(blob.size), "X-Linked-Etag": f'"{blob.sha256}"'}
        if isinstance(self.cas, Path) and blob.sha256 in self._xet_hashes:
            headers["X-Xet-Hash"] = self._xet_hashes[blob.sha256]
            headers["X-Xet-Refresh-Route"] = (
                f"{self.url}/api/{repo.kind}s/{repo.id}/xet-read-token/{commit.oid}"
            )
        if request.method == "HEAD":
            return Response(headers=headers | {"Content-Length": str(blob.size)})
        content = self.content(blob)
        first, last = 0, blob.size - 1
        if asked := request.headers.get("range"):
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{blob.size}"
        return Response(content[first : last + 1], 206 if asked else 200, headers)
