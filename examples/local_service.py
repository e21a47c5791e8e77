"""A target and a service of this machine, for the examples. Everything is kept in `demo-out/`."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx2
from rich.console import Console

from examples.tiny_target import Recipe, cached_target

OUT = Path("demo-out")  # relative paths keep the output short: an example runs in the repository's root
TARGET = OUT / "target"
QUARRY = Path(sys.executable).with_name("quarry")

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
POLL_S = 0.2

SETTINGS = {
    "QUARRY_MODEL_ROOTS": json.dumps([str(OUT)]),
    # Without these vLLM compiles for a minute and takes more memory for its cache than this model can use.
    "QUARRY_ENGINE_OPTIONS": json.dumps({"enforce_eager": True}),
    "QUARRY_CPU_KV_CACHE_GIB": "1",
}

CONSOLE = Console(soft_wrap=True)


class ExampleFailed(Exception):
    """What went wrong, and where to look."""


def prepare_target() -> str:
    """Put the target where jobs name it, and return the name of its recipe."""
    CONSOLE.print("[bold]1. The target[/]: a small Qwen3, trained for one to three minutes at the first run")
    made = cached_target(Recipe())
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(made, TARGET)
    training = json.loads((TARGET / "training.json").read_text())
    before, after = training["loss_before"], training["loss_after"]
    CONSOLE.print(f"   {TARGET}: training took its loss from {before:.2f} to {after:.2f} nats a token")
    return made.name


@contextmanager
def running_service(data: Path, log: Path, settings: Mapping[str, str], port: int) -> Iterator[str]:
    """Start `quarry serve`, wait until it is ready, yield its base URL, and stop it. Raises ExampleFailed."""
    server = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **SETTINGS, **settings, "QUARRY_PORT": str(port)}
    command = [str(QUARRY), "serve", "--data-dir", str(data)]
    with (
        log.open("wb") as lines,
        # In a group of its own: Ctrl-C ends the example, which then ends the service.
        subprocess.Popen(command, env=environment, stdout=lines, stderr=lines, process_group=0) as child,
    ):
        try:
            wait_until_ready(server, child, log)
            yield server
        finally:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
    if child.returncode != 0:
        raise ExampleFailed(f"the service ended with exit code {child.returncode}: see {log}")


def free_port(wanted: int = 0) -> int:
    """Return a port of the loopback interface that was free a moment ago: `wanted`, if it was."""
    try:
        with socket.create_server(("127.0.0.1", wanted)) as server:
            port: int = server.getsockname()[1]
    except OSError:
        return free_port()
    return port


def wait_until_ready(server: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the service takes jobs. Raises ExampleFailed."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while child.poll() is None and time.monotonic() < deadline:
        try:
            if httpx2.get(f"{server}/readyz", trust_env=False).is_success:
                return
        except httpx2.TransportError:
            pass  # it does not listen yet
        time.sleep(POLL_S)
    raise ExampleFailed(f"the service did not become ready: see {log}")
