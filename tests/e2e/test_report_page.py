"""The page of `quarry verify --report` in a browser: it looks right everywhere, and nothing in it runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli import main
from tests.support.browser import Browser, running_browser
from tests.support.reference_models import TinyModel
from tests.support.shards import capture, write_dataset

EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
LIGHT_AND_DARK = [(width, dark) for width in (400, 1200) for dark in (False, True)]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def make_page(folder: Path, *, broken: bool) -> Path:
    """Write a dataset, verify it as people do, and return the page."""
    model = TinyModel(folder / "model", "llama", "bfloat16")
    write_dataset(folder / "dataset", {0: capture(model, dtype="bfloat16")})
    if broken:
        shard = next((folder / "dataset" / "data").rglob("*.parquet"))
        shard.write_bytes(shard.read_bytes()[:-1])
        shard.with_name(EVIL.replace("/", "&")).with_suffix(".parquet").write_bytes(b"")
    page = folder / "page.html"
    with pytest.raises(SystemExit) as left:
        main(["verify", str(folder / "dataset"), "--model", str(model.folder), "--report", str(page)])
    assert left.value.code == int(broken)
    return page


@pytest.fixture(scope="module", params=[False, True], ids=["right", "broken"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_page(tmp_path_factory.mktemp("made"), broken=request.param)


@pytest.mark.parametrize(("width", "dark"), LIGHT_AND_DARK)
def test_the_page_loads_nothing_and_breaks_no_rule_of_its_policy(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    requests = [event["request"]["url"] for event in browser.events("Network.requestWillBeSent")]
    assert requests == [page.as_uri()]
    assert browser.events("Log.entryAdded") == []
    assert browser.events("Runtime.exceptionThrown") == []
    assert browser.ask("document.title") != "owned"
    assert browser.ask("document.scripts.length") == 0


@pytest.mark.parametrize(("width", "dark"), LIGHT_AND_DARK)
def test_the_page_fits_its_window(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    every = "[...document.querySelectorAll('svg, h1, h2, p, dd, li')]"
    wide = f"{every}.filter(e => e.getBoundingClientRect().right > innerWidth)"
    assert browser.ask(f"{wide}.length") == 0


def luminance(browser: Browser, element: str, part: str) -> float:
    """Return the relative luminance of an element's colour as WCAG defines it."""
    colour = browser.ask(f"getComputedStyle(document.querySelector({element!r})).{part}")
    parts = [int(value) / 255 for value in colour[4:-1].split(",")]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    ("text", "ground"),
    [
        ("body", "body"),
        (".muted", "body"),
        (".verdict h2", ".verdict"),
        (".card", ".card"),
        (".checks b", ".card"),
        ("a, summary, .brand", "body"),
        ("footer", "body"),
    ],
)
def test_text_stands_out_from_its_ground_in_light_and_dark(browser, page, dark, text, ground):
    browser.open(page, width=1200, dark=dark)
    one, other = luminance(browser, text, "color"), luminance(browser, ground, "backgroundColor")
    assert (luminance(browser, "body", "backgroundColor") < 0.1) == dark
    assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 4.5


def test_a_script_that_got_past_the_escaping_would_not_run(browser, page, tmp_path):
    """The second lock: markup is planted into the finished page, and the policy stops it."""
    planted = tmp_path / "planted.html"
    planted.write_text(
        page.read_text().replace("<main>", f"<main>{EVIL}<p style='color:red' id=styled>x</p>")
    )
    browser.open(planted, width=1200)
    assert browser.ask("document.scripts.length") == 1
    assert browser.ask("document.title") != "owned"
    assert browser.ask("getComputedStyle(document.querySelector('#styled')).color") != "rgb(255, 0, 0)"
    refused = [event["entry"]["text"] for event in browser.events("Log.entryAdded")]
    assert any("inline script" in text for text in refused), refused
