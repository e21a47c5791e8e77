"""A service behind nginx and behind Caddy, as deploy/ configures them, whatever they do to a request."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from service.control.request_body import NODE_BYTES
from service.settings import Settings
from tests.support.ports import free_port
from tests.support.service_process import Serving, body_of, serving
from tests.support.tiny_model import random_target

pytestmark = [pytest.mark.outside, pytest.mark.slow]

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = "quarry.example.org"
KEY = "a" * 40
HEADERS = {"Host": NAME, "Authorization": f"Bearer {KEY}"}


def nginx(folder: Path, port: int, upstream: str) -> list[str]:
    """Write deploy/nginx.conf for these ports, without TLS, in what a user's nginx needs around it."""
    site = (DEPLOY / "nginx.conf").read_text()
    site = re.sub(r"(?m)^ *ssl_.*\n", "", site).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    places = "".join(
        f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    http = f"access_log off; {places} {site.replace('127.0.0.1:8642', upstream)}"
    user = "user root root;" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"daemon off; {user} pid {folder}/pid; error_log {folder}/error.log; events {{}} http {{ {http} }}"
    )
    return ["nginx", "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]


def caddy(folder: Path, port: int, upstream: str) -> list[str]:
    """Write deploy/Caddyfile for these ports, without TLS and the administrator's port."""
    site = (DEPLOY / "Caddyfile").read_text().replace("127.0.0.1:8642", upstream)
    site = site.replace(f"\n{NAME} {{", f"\nhttp://{NAME}:{port} {{\n\tbind 127.0.0.1")
    (folder / "Caddyfile").write_text("{\n\tadmin off\n}\n" + site)
    return ["caddy", "run", "--adapter", "caddyfile", "--config", f"{folder}/Caddyfile"]


PROXIES = {"nginx": nginx, "caddy": caddy}


@contextmanager
def behind(name: str, folder: Path, service: Serving) -> Iterator[int]:
    """Start a proxy before a service; yield its port."""
    port = free_port()
    folder.mkdir()
    command = PROXIES[name](folder, port, service.url.removeprefix("http://"))
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as proxy:
        try:
            deadline = time.monotonic() + 30
            while True:
                assert proxy.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield port
        finally:
            proxy.terminate()


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed (Debian: nginx-light, caddy)")
    return str(request.param)


@contextmanager
def service(folder: Path) -> Iterator[Serving]:
    (folder.with_suffix(".key")).write_text(KEY)
    with serving(
        folder,
        QUARRY_ADMIN_KEY_FILE=str(folder.with_suffix(".key")),
        QUARRY_ALLOWED_HOSTS=json.dumps([NAME]),
    ) as started:
        yield started


def answers(port: int, parts: list[bytes], number: int) -> list[bytes]:
    """Send the parts one after another; return the status lines of so many answers."""
    seen = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        while len(found := re.findall(rb"HTTP/1\.1 (\d{3})", seen)) < number:
            part = connection.recv(65536)
            assert part, seen
            seen += part
    return found


def test_two_services_behind_one_proxy_each_serve_their_own(proxy: str, tmp_path: Path) -> None:
    """1. a job to each service  2. its events come through to the end  3. neither knows the other's."""
    target = random_target(tmp_path / "model", hidden=64)
    with (
        service(tmp_path / "one") as one,
        service(tmp_path / "two") as two,
        behind(proxy, tmp_path / "p1", one) as first,
        behind(proxy, tmp_path / "p2", two) as second,
        httpx2.Client(headers=HEADERS, trust_env=False, timeout=60) as client,
    ):
        ids = {}
        for port in (first, second):
            body = body_of(target, layers=[1])
            answer = client.post(f"http://127.0.0.1:{port}/extract", json=body)
            assert answer.status_code == 202, answer.text
            ids[port] = answer.json()["id"]
            with client.stream("GET", f"http://127.0.0.1:{port}/jobs/{ids[port]}/events") as events:
                lines = list(events.iter_lines())
            assert any("completed" in line for line in lines), lines
        other = client.get(f"http://127.0.0.1:{first}/jobs/{ids[second]}")
        assert other.status_code == (200 if ids[first] == ids[second] else 404)
        foreign = client.get(f"http://127.0.0.1:{first}/jobs", headers={"Authorization": "Bearer none"})
        assert foreign.status_code == 401


def test_requests_that_are_split_and_joined_are_answered_one_by_one(proxy: str, tmp_path: Path) -> None:
    """A proxy sends on what it gets in parts of its own, and many callers' requests on one connection."""
    head = f"Host: {NAME}\r\nAuthorization: Bearer {KEY}\r\n".encode()
    get = b"GET /jobs HTTP/1.1\r\n" + head + b"\r\n"
    post = b"POST /extract HTTP/1.1\r\n" + head + b"Content-Type: application/json\r\n"
    sized = post + b"Content-Length: 2\r\n\r\n{}"
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 3000 + b"2\r\n{}\r\n0\r\n\r\n"
    doubled = post + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + get
    with service(tmp_path / "one") as one, behind(proxy, tmp_path / "p1", one) as port:
        assert answers(port, [get + sized + get + sized], 4) == [b"200", b"422", b"200", b"422"]
        assert answers(port, [bytes([byte]) for byte in sized], 1) == [b"422"]
        assert answers(port, [chunked], 1)[0] in (b"400", b"422")
        assert answers(port, [doubled], 1)[0] in (b"400", b"422"), "one request, not two read in two ways"
        upgrade = get.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert answers(port, [upgrade], 1) == [b"200"]
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(sized[:-1])
            assert answers(port, [get], 1) == [b"200"], "a caller who never ends is the proxy's"
        large = httpx2.post(
            f"http://127.0.0.1:{port}/extract", content=b"x" * 9_000_000, headers=HEADERS, trust_env=False
        )
        assert large.status_code in (413, 502), "Caddy 2.6 says that it could not send it on"


def test_the_page_is_told_the_scheme_by_the_proxy_alone(proxy: str, tmp_path: Path) -> None:
    """Whatever a caller says of it; and no answer leads to another address, or to another port."""
    with (
        service(tmp_path / "one") as one,
        behind(proxy, tmp_path / "p1", one) as port,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, trust_env=False) as client,
    ):
        client.headers["Host"] = f"{NAME}:{port}"
        signed_in = client.post("/ui/sign-in", data={"key": KEY}).headers["Set-Cookie"].partition(";")[0]
        shown = client.get("/", headers={"X-Forwarded-Proto": "https", "Cookie": signed_in})
        assert shown.status_code == 200 and f"http://{NAME}:{port}" in shown.text
        assert f"https://{NAME}" not in shown.text
        assert client.get("/jobs/").status_code == 404


def test_a_body_as_large_as_the_service_takes_comes_through(proxy: str, tmp_path: Path) -> None:
    most = Settings().max_body_bytes - NODE_BYTES
    with service(tmp_path / "one") as one, behind(proxy, tmp_path / "p1", one) as port:
        for num_bytes, status in ((most, 422), (most + 1, 413)):
            answer = httpx2.post(
                f"http://127.0.0.1:{port}/extract",
                content=b" " * (num_bytes - 2) + b"{}",
                headers=HEADERS | {"Content-Type": "application/json"},
                trust_env=False,
                timeout=60,
            )
            assert answer.status_code == status, answer.text
            assert answer.headers["Content-Type"] == "application/problem+json", "the service's own answer"
