"""A real browser for tests: Chromium without a window, spoken to over a pipe in its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
READ_BYTES = 2**16


class Browser:
    """One tab of a running browser. `seen` holds every event that it has told of so far."""

    def __init__(self, commands: int, answers: int) -> None:
        """Speak through the two pipes."""
        self._commands, self._answers = commands, answers
        self._sent, self._rest = 0, b""
        self._session: str | None = None
        self.seen: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises RuntimeError with what the browser says."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            self.seen.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path | str, *, width: int, dark: bool = False, height: int = 900) -> None:
        """Load a file or an address in a window of `width` pixels and wait until all of it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.seen.clear()
        url = page if isinstance(page, str) else page.absolute().as_uri()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.seen):
            self.seen.append(self._next())

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a page's own policy does not bind it."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def events(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of one kind since the page was opened."""
        return [event["params"] for event in self.seen if event.get("method") == method]

    def picture(self) -> bytes:
        """Return a PNG of the whole page."""
        options = {"format": "png", "captureBeyondViewport": True}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", **options, clip=clip)["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, READ_BYTES)
            if not part:
                raise RuntimeError("the browser ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told


def program() -> str:
    """Return the browser's path. Raises RuntimeError saying what to install."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError(
            f"this test needs a browser ({', '.join(NAMES)}): install Debian's package 'chromium'"
        )
    return found


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile in the folder `profile`; end it at the end."""
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    # The browser reads commands from descriptor 3 and answers on 4.
    place = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'
    command = [
        "bash",
        "-c",
        place,
        "bash",
        program(),
        *options,
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    with (profile / "log").open("wb") as log:
        child = subprocess.Popen(command, pass_fds=(commands_out, answers_in), stdout=log, stderr=log)
    os.close(commands_out)
    os.close(answers_in)
    try:
        yield Browser(commands_in, answers_out)
    finally:
        child.terminate()
        child.wait(30)
        os.close(commands_in)
        os.close(answers_out)
