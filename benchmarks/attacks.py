"""`python -m benchmarks.attacks [SECONDS]`: how long `/healthz` takes while one caller attacks an open port.

Each attack is played by several threads of a process at low priority, since it stands for other machines;
its answers are not looked at. docs/reliability.md has the table.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from threading import Thread

import httpx2

from tests.support.api import small_target
from tests.support.service_process import body_of, serving

PAUSE_S = 0.02
THREADS = 16
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
SLOW_TEMPLATE = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4
COSTLY_TEMPLATE = "{{ '' ~ " + " ~ ".join(f"({number} + {number})" for number in range(20_000)) + " }}"
MANY_SAMPLES = [{"text": "x" * 35}] * 100_000
"""As many as a request may have, in a body of nearly 8 MiB, its objects counted."""
NUMBERS = count()

Attack = Callable[[str, Path], None]


def post(url: str, path: str, body: object) -> None:
    """Post a document and drop the answer."""
    headers = {"Idempotency-Key": f"{os.getpid()}-{next(NUMBERS)}"}
    httpx2.post(url + path, json=body, headers=headers, trust_env=False, timeout=60)


def raw(url: str, *parts: bytes, read: bool = True, pause_s: float = 0.0) -> None:
    """Send parts on a connection of their own, and read the answer or wait."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        if read:
            while connection.recv(65536):
                pass
        else:
            time.sleep(5)


def job(folder: Path, **changes: object) -> dict[str, object]:
    """Return a job for the target in the folder."""
    return body_of(folder / "model", **changes)


def hostile_model(folder: Path) -> Path:
    """Return a model whose config asks for a million layers."""
    model = folder / f"hostile-{os.getpid()}"
    if not model.exists():
        model.mkdir()
        for path in (folder / "model").iterdir():
            (model / path.name).write_bytes(path.read_bytes())
        config = json.loads((model / "config.json").read_text())
        del config["vocab_size"]
        (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**6}))
    return model


def invented_method(url: str, folder: Path) -> None:
    """Ask by a method that nobody has."""
    raw(url, b"X%d%d /jobs HTTP/1.1\r\n" % (os.getpid(), next(NUMBERS)) + HOST + b"\r\n")


def globs(url: str, folder: Path) -> None:
    """Name a source by as many wildcards as are allowed."""
    post(url, "/extract", job(folder, source={"kind": "file", "path": "/usr/**/*/*.jsonl"}))


CHUNKED = b"POST /extract HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
ATTACKS: dict[str, Attack] = {
    "none": lambda url, folder: time.sleep(1),
    "estimates of another's schedule (1)": lambda url, folder: post(
        url, "/estimate", job(folder, source={"kind": "posted", "schedule": "nightly"})
    ),
    "bodies in chunks of one byte (4)": lambda url, folder: raw(url, CHUNKED + b"1\r\n \r\n" * 100_000),
    "configs of a million layers (6)": lambda url, folder: post(
        url, "/extract", job(folder) | {"model": str(hostile_model(folder))}
    ),
    "globs over a large tree (7)": globs,
    "templates that compile for long (8)": lambda url, folder: post(
        url, "/extract", job(folder, chat_template=COSTLY_TEMPLATE)
    ),
    "large answers that nobody takes (9)": lambda url, folder: raw(
        url, b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n", read=False
    ),
    "large bodies (9)": lambda url, folder: post(
        url, "/extract", job(folder, source={"kind": "inline", "samples": [{"text": "x" * 7_000_000}]})
    ),
    "large bodies of many samples": lambda url, folder: post(
        url, "/extract", job(folder, source={"kind": "inline", "samples": MANY_SAMPLES})
    ),
    "invented methods (10)": invented_method,
    "endless estimates (15)": lambda url, folder: post(
        url, "/estimate", job(folder, chat_template=SLOW_TEMPLATE)
    ),
    "submissions and resumes (16)": lambda url, folder: post(url, "/extract", job(folder)),
    "requests that never end (drip)": lambda url, folder: raw(
        url, *[b"G", b"E", b"T", b" "] * 5, read=False, pause_s=0.1
    ),
    "requests ahead of answers": lambda url, folder: raw(
        url, (b"GET /jobs HTTP/1.1\r\n" + HOST + b"\r\n") * 5000
    ),
}


def play(attack: Attack, url: str, folder: Path, until_s: float) -> None:
    """Attack again and again until the time is over; an error is what an attacker may get."""
    while time.time() < until_s:
        with suppress(OSError, httpx2.HTTPError):
            attack(url, folder)


def attack(name: str, url: str, folder: Path, until_s: float) -> None:
    """Attack from several threads of this process."""
    os.nice(19)
    for _ in range(THREADS):
        Thread(target=play, args=(ATTACKS[name], url, folder, until_s), daemon=True).start()
    time.sleep(max(0.0, until_s - time.time()))
    os._exit(0)


def measure(name: str, seconds: float, folder: Path) -> tuple[float, float, int, int]:
    """Return p50 and p99 of `/healthz` in ms, how many were asked, and how many were not answered."""
    waits_s: list[float] = []
    failed = 0
    options = ["--no-worker"]
    with serving(folder / f"data-{len(list(folder.iterdir()))}", *options) as service:
        until_s = time.time() + seconds + 1
        command = [sys.executable, "-m", "benchmarks.attacks", name, service.url, str(folder), str(until_s)]
        attacker = subprocess.Popen(command)
        time.sleep(1)  # it imports
        while time.time() < until_s:
            began_s = time.perf_counter()
            try:
                probe = HTTPConnection(service.url.removeprefix("http://"), timeout=30)
                probe.request("GET", "/healthz")
                failed += probe.getresponse().status != 200
                probe.close()
            except (HTTPException, OSError):
                failed += 1
            waits_s.append(time.perf_counter() - began_s)
            time.sleep(PAUSE_S)
        attacker.wait()
    cuts = quantiles(waits_s, n=100)
    return cuts[49] * 1000, cuts[98] * 1000, len(waits_s), failed


def main() -> None:
    """Play every attack, and print a row of Markdown for each."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    print("| attack | p50 | p99 | asked | not answered | load |\n| --- | --- | --- | --- | --- | --- |")
    for name in ATTACKS:
        with TemporaryDirectory() as scratch:
            small_target(Path(scratch) / "model")
            p50_ms, p99_ms, asked, failed = measure(name, seconds, Path(scratch))
        print(
            f"| {name} | {p50_ms:.0f} ms | {p99_ms:.0f} ms | {asked} | {failed} | {os.getloadavg()[0]:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        attack(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    main()
