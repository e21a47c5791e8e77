"""Where a fake Hub keeps large files: LFS objects, or xet's storage as it takes uploads over HTTP."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.hub_answers import Refusal

Handler = Callable[[Request], Awaitable[Response]]
MakeRoute = Callable[[str, str, Handler, str], Route]

SHARD_RECORD_BYTES = 48
"""Of a xet shard: its header, and everything in the list of files that follows."""
LAST_RECORD = b"\xff" * 32
WITH_CHECKSUMS, WITH_SHA256 = 1 << 31, 1 << 30


class LfsStorage:
    """Objects by their sha256. Those larger than `part_bytes` come in parts, as to S3.

    Where it `keeps_bytes` no longer, it only knows of each object that it came whole.
    """

    def __init__(self, part_bytes: int | None = None) -> None:
        self._part_bytes, self.keeps_bytes = part_bytes, True
        self._objects: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._parts: dict[str, dict[int, bytes]] = {}

    def routes(self, route: MakeRoute) -> list[Route]:
        return [
            route("lfs_put", "/lfs/{oid}", self._put, "PUT"),
            route("lfs_part", "/lfs/{oid}/parts/{number:int}", self._put_part, "PUT"),
            route("lfs_complete", "/lfs/{oid}/complete", self._complete, "POST"),
            route("lfs_verify", "/lfs/{oid}/verify", self._verify, "POST"),
        ]

    def forget(self) -> None:
        self._objects.clear()
        self._sizes.clear()
        self._parts.clear()

    def content(self, sha256: str) -> bytes | None:
        return self._objects.get(sha256)

    def holds(self, sha256: str, num_bytes: int) -> bool:
        return self._sizes.get(sha256) == num_bytes

    def actions(self, url: str, sha256: str, num_bytes: int) -> dict[str, Any]:
        """Return what the batch endpoint answers for an object: nothing where it is there."""
        if sha256 in self._sizes:
            return {}
        href, header = f"{url}/lfs/{sha256}", {}
        upload: dict[str, Any] = {"href": href, "header": header}
        if self._part_bytes is not None and num_bytes > self._part_bytes:
            numbers = range(1, -(-num_bytes // self._part_bytes) + 1)
            header = {str(number): f"{href}/parts/{number}" for number in numbers}
            upload = {"href": f"{href}/complete", "header": header | {"chunk_size": str(self._part_bytes)}}
        return {"actions": {"upload": upload, "verify": {"href": f"{href}/verify"}}}

    def _keep(self, sha256: str, content: bytes) -> Response:
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Refusal(400, "the bytes do not have the promised sha256")
        self._sizes[sha256] = len(content)
        if self.keeps_bytes:
            self._objects[sha256] = content
        return Response()

    async def _put(self, request: Request) -> Response:
        return self._keep(request.path_params["oid"], await request.body())

    async def _put_part(self, request: Request) -> Response:
        content = await request.body()
        parts = self._parts.setdefault(request.path_params["oid"], {})
        parts[request.path_params["number"]] = content
        return Response(headers={"ETag": hashlib.md5(content).hexdigest()})

    async def _complete(self, request: Request) -> Response:
        parts = self._parts.get(request.path_params["oid"], {})
        named = [(part["partNumber"], part["etag"]) for part in (await request.json())["parts"]]
        if named != [(number, hashlib.md5(parts[number]).hexdigest()) for number in sorted(parts)]:
            raise Refusal(400, "these are not the parts that were uploaded")
        return self._keep(request.path_params["oid"], b"".join(parts[number] for number in sorted(parts)))

    async def _verify(self, request: Request) -> Response:
        asked = await request.json()
        if not self.holds(asked["oid"], asked["size"]):
            raise Refusal(404, "no such object")
        return Response()


class XetStorage:
    """Xorbs (blocks of chunks) and, from the shards, the sha256 of each file that they make up.

    A shard that names a xorb which is not here is refused, as the real storage does. Uploads only.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._uploads: set[str] = set()
        self._xorbs: set[str] = set()
        self._files: set[str] = set()

    def routes(self, route: MakeRoute) -> list[Route]:
        base, xorb = "/cas/{generation:int}", "/default/{hash}"
        return [
            route("cas_chunk", base + "/v1/chunks" + xorb, self._chunk, "GET"),
            route("cas_grant", base + "/v1/xorb-grants" + xorb, self._grant, "POST"),
            route("cas_put", "/cas-uploads/{hash}", self._put, "PUT"),
            route("cas_xorb_commit", base + "/v1/xorb-commits" + xorb + "/grant/{id}", self._commit, "POST"),
            route("cas_xorb", base + "/v1/xorbs" + xorb, self._xorb, "POST"),
            route("cas_shard", base + "/v2/shards", self._shard, "POST"),
            route("cas_telemetry", "/v1/telemetry", self._telemetry, "POST"),
        ]

    @property
    def path(self) -> str:
        """The storage's path on the Hub; the client's caches of what is here are kept by it."""
        return f"/cas/{self._generation}"

    def forget(self) -> None:
        self._generation += 1
        self._uploads.clear()
        self._xorbs.clear()
        self._files.clear()

    def holds(self, sha256: str) -> bool:
        return sha256 in self._files

    async def _chunk(self, request: Request) -> Response:
        return Response(status_code=404)

    async def _grant(self, request: Request) -> Response:
        name = request.path_params["hash"]
        if name in self._xorbs:
            return JSONResponse({})
        href = str(request.base_url) + f"cas-uploads/{name}"
        return JSONResponse({"id": "g", "method": "PUT", "url": href, "headers": {}}, 201)

    async def _put(self, request: Request) -> Response:
        if await request.body():
            self._uploads.add(request.path_params["hash"])
        return Response()

    async def _commit(self, request: Request) -> Response:
        if request.path_params["hash"] not in self._uploads:
            return Response(status_code=404)
        return self._insert(request.path_params["hash"])

    async def _xorb(self, request: Request) -> Response:
        await request.body()
        return self._insert(request.path_params["hash"])

    def _insert(self, name: str) -> Response:
        inserted = name not in self._xorbs
        self._xorbs.add(name)
        return JSONResponse({"was_inserted": inserted})

    async def _shard(self, request: Request) -> Response:
        xorbs, files = _of_shard(await request.body())
        if not xorbs <= self._xorbs:
            return Response("the shard names a xorb that was not uploaded", 400)
        self._files |= files
        return Response('{"type": "result"}\n', media_type="application/x-ndjson")

    async def _telemetry(self, request: Request) -> Response:
        return Response()


def _of_shard(body: bytes) -> tuple[set[str], set[str]]:
    """Return the xorbs that a shard's files are made of, and the sha256 of the files.

    A file is a record of its hash, flags and number of segments; a record for each segment; with a flag, as
    many checksums; with another, a record of the sha256.
    """
    records = [body[at : at + SHARD_RECORD_BYTES] for at in range(0, len(body), SHARD_RECORD_BYTES)][1:]
    xorbs, files, at = set(), set(), 0
    while records[at][:32] != LAST_RECORD:
        flags, segments = (int.from_bytes(records[at][start : start + 4], "little") for start in (32, 36))
        xorbs |= {_hexed(record) for record in records[at + 1 : at + 1 + segments]}
        at += 1 + segments * (2 if flags & WITH_CHECKSUMS else 1)
        if flags & WITH_SHA256:
            files.add(_hexed(records[at]))
            at += 1
    return xorbs, files


def _hexed(record: bytes) -> str:
    """Return a record's hash as xet writes it: four little-endian words."""
    return "".join(record[at : at + 8][::-1].hex() for at in range(0, 32, 8))
