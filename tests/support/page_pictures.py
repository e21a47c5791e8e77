"""Pictures of each page for the documents: `make pages`. PNGs of a palette, in both themes and two widths."""

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.support.browser import Browser, running_browser
from tests.support.page_seed import Seeded, seeded

FOLDER = Path(__file__).parents[2] / "docs" / "images"
COLOURS = 160
SIZES = (1280, 360)
SHOWN = ("jobs", "job", "sample", "schedules", "workers", "sign-in")
LIVE_S = 10.0


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        seeded(Path(folder)) as service,
        running_browser(Path(profile)) as browser,
    ):
        for name in reversed(SHOWN):  # the sign-in before there is a session
            for width in SIZES:
                for dark in (False, True):
                    picture = take(browser, service, name, width=width, dark=dark)
                    theme = "dark" if dark else "light"
                    (FOLDER / f"page-{name}-{width}-{theme}.png").write_bytes(picture)
            if name == SHOWN[-1]:
                service.sign_in(browser)
    written = sum(path.stat().st_size for path in FOLDER.glob("page-*.png"))
    print(f"{written:,} bytes in {FOLDER}", file=sys.stderr)


def take(browser: Browser, service: Seeded, name: str, *, width: int, dark: bool) -> bytes:
    """Return a picture of a page once its numbers are live, with few colours."""
    browser.open(f"{service.url}{service.pages()[name]}", width=width, dark=dark, height=320)
    until = time.monotonic() + LIVE_S
    waits = "document.querySelector('[data-live]') && document.getElementById('live').textContent !== 'live'"
    while browser.ask(f"Boolean({waits})") and time.monotonic() < until:
        time.sleep(0.1)
    image = (
        Image.open(io.BytesIO(browser.picture())).convert("RGB").quantize(COLOURS, Image.Quantize.FASTOCTREE)
    )
    small = io.BytesIO()
    image.save(small, "PNG", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    main()
