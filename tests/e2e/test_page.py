"""The page in a browser: it fits, breaks no rule, is reached by keyboard, and shows what happens."""

import time
from collections.abc import Iterator
from importlib.resources import files

import pytest

from tests.support.browser import Browser, running_browser
from tests.support.page_seed import Seeded, seeded

pytestmark = [pytest.mark.slow, pytest.mark.outside]

WIDTHS = (360, 1280)
NOT_FOUND = "problem"
FOCUSABLE = "a[href], button:not([hidden]), input:not([type=hidden]), summary, [tabindex='0']"
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true })"
ENDED = "document.activeElement === document.body"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    with seeded(tmp_path_factory.mktemp("page")) as service:
        yield service


@pytest.fixture(scope="module")
def browser(service: Seeded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        service.sign_in(browser)
        yield browser


@pytest.fixture(scope="module")
def axe() -> str:
    return (files("axe_playwright_python") / "axe.min.js").read_text()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_each_page_is_accessible_fits_and_breaks_no_rule(
    service: Seeded, browser: Browser, axe: str, width: int, dark: bool
):
    for name, path in service.pages().items():
        browser.open(f"{service.url}{path}", width=width, dark=dark)
        browser.ask(OPEN_ALL)
        assert browser.ask("document.documentElement.scrollWidth") <= width, name
        assert browser.ask("getComputedStyle(document.body).backgroundColor") == (
            "rgb(15, 19, 23)" if dark else "rgb(246, 247, 249)"
        ), "the style sheet is there"
        browser.ask(axe)
        broken = browser.ask(
            "axe.run({resultTypes: ['violations']}).then(found => found.violations.map("
            "one => one.id + ' ' + one.nodes.map(node => node.html).join(' | ')))"
        )
        assert broken == [], name
        told = [entry["entry"]["text"] for entry in browser.events("Log.entryAdded")]
        assert [text for text in told if name != NOT_FOUND or "404" not in text] == [], name
        assert browser.events("Runtime.exceptionThrown") == []
        foreign = {
            event["request"]["url"]
            for event in browser.events("Network.requestWillBeSent")
            if not event["request"]["url"].startswith(service.url)
        }
        assert foreign == set(), name


def test_every_link_and_button_is_reached_by_keyboard_and_shows_that_it_is(service: Seeded, browser: Browser):
    for name, path in service.pages().items():
        browser.open(f"{service.url}{path}", width=1280)
        browser.ask(OPEN_ALL)
        browser.ask(f"window.all = [...document.querySelectorAll({FOCUSABLE!r})]; window.reached = new Set()")
        for _ in range(browser.ask("all.length") + 2):
            for kind in ("rawKeyDown", "keyUp"):
                key = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
                browser.call("Input.dispatchKeyEvent", type=kind, **key)
            browser.ask("reached.add(document.activeElement)")
            if not browser.ask(ENDED):
                assert browser.ask("getComputedStyle(document.activeElement).outlineStyle") != "none", name
        assert browser.ask("all.filter(one => !reached.has(one)).map(one => one.outerHTML)") == [], name


def until(browser: Browser, expression: str) -> None:
    """Wait until an expression of the page is true."""
    deadline = time.monotonic() + 60
    while not browser.ask(expression):
        assert time.monotonic() < deadline, browser.ask("document.getElementById('main').innerText")
        time.sleep(0.2)


def test_a_page_follows_its_jobs_and_rests_while_nobody_looks(service: Seeded, browser: Browser):
    """1. A running job's page is open. 2. Its numbers grow, and what is used stays. 3. The tab is hidden."""
    request = service.client.get(f"/jobs/{service.jobs['running']}/request").json()
    made = service.client.post("/extract", json=request, params={"priority": 9}).raise_for_status().json()
    browser.open(f"{service.url}/ui/jobs/{made['id']}", width=1280)
    written = "Number(document.getElementById('written').textContent.replaceAll(',', ''))"
    first = browser.ask(written)
    browser.ask("document.querySelector('details').open = true; document.querySelector('summary').focus(); 1")
    until(browser, f"{written} > {first}")
    assert browser.ask("document.getElementById('live').textContent") == "live"
    assert browser.ask("document.querySelector('details').open")
    assert browser.ask("document.activeElement === document.querySelector('summary')")
    hide = "Object.defineProperty(document, 'hidden', {value: true, configurable: true})"
    browser.ask(f"{hide}; document.dispatchEvent(new Event('visibilitychange')); 1")
    time.sleep(1)  # an answer that is on its way
    last = browser.ask(written)
    time.sleep(8)
    assert browser.ask(written) == last


def test_a_page_is_live_again_after_an_answer_that_did_not_come(service: Seeded, browser: Browser):
    """1. An answer hangs until its deadline, here a short one. 2. The page says so. 3. The next one comes."""
    browser.open(f"{service.url}/", width=1280)
    browser.ask(
        "window.real = fetch; AbortSignal.timeout = () => { const end = new AbortController();"
        "setTimeout(() => end.abort(), 500); return end.signal; };"
        "window.fetch = (url, {signal}) => new Promise((_, no) => signal.addEventListener('abort', no)); 1"
    )
    until(browser, "document.getElementById('live').textContent === 'not live'")
    browser.ask("window.fetch = real; 1")
    until(browser, "document.getElementById('live').textContent === 'live'")


@pytest.fixture
def hurried(browser: Browser) -> Iterator[None]:
    """Pages whose timers run ten times as fast, and whose streams, all in `sources`, are refused at first."""
    script = (
        "const timer = setTimeout; window.setTimeout = (call, ms) => timer(call, ms / 10);"
        "window.sources = []; window.refused = true; window.EventSource = class extends EventSource {"
        "constructor(url) { super(window.refused ? '/ui/none' : url); sources.push(this); } }"
    )
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
    yield
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added)


@pytest.mark.usefixtures("hurried")
def test_a_stream_that_was_refused_is_asked_for_again(service: Seeded, browser: Browser):
    browser.open(f"{service.url}/", width=1280)
    until(browser, "sources[0].readyState === EventSource.CLOSED")
    browser.ask("window.refused = false; 1")
    until(browser, "sources.at(-1).readyState === EventSource.OPEN && sources.length > 1")


@pytest.mark.usefixtures("hurried")
def test_a_page_of_another_version_of_the_service_is_loaded_anew(service: Seeded, browser: Browser):
    browser.open(f"{service.url}/", width=1280)
    browser.ask("window.old = true; document.querySelector('script').src = '/ui/static/0/page.js'; 1")
    until(browser, "document.readyState === 'complete' && !('old' in window)")
    assert "/ui/static/0/" not in browser.ask("document.querySelector('script').src")


def test_the_list_says_for_what_a_job_waits_while_it_does(service: Seeded, browser: Browser):
    """1. The list is open. 2. A job is submitted, paused, cancelled, deleted. 3. Its row says so."""
    browser.open(f"{service.url}/", width=1280)
    browser.ask("window.link = document.querySelector('tbody a'); link.focus(); 1")
    request = service.client.get(f"/jobs/{service.jobs['whole']}/request").json()
    job_id = service.client.post("/extract", json=request, params={"priority": -9}).json()["id"]
    service.client.post(f"/jobs/{job_id}/pause").raise_for_status()
    until(browser, f"Boolean(window.row = document.getElementById({job_id!r}))")
    waits = "(row.querySelector('.waits') || {innerText: ''}).innerText"
    until(browser, f"{waits} === 'waits for someone to resume it'")
    changed = "row.querySelector('time').dateTime"
    before = browser.ask(changed)
    service.client.post(f"/jobs/{job_id}/cancel").raise_for_status()
    until(browser, f"{waits} === ''")
    assert browser.ask(changed) > before
    service.client.delete(f"/jobs/{job_id}").raise_for_status()
    until(browser, "!row.isConnected")
    assert browser.ask("document.activeElement === link && link.isConnected")


def test_a_page_says_that_the_session_or_the_job_has_ended(service: Seeded, browser: Browser):
    browser.open(f"{service.url}/ui/jobs/{service.jobs['cancelled']}", width=1280)
    service.client.delete(f"/jobs/{service.jobs['cancelled']}").raise_for_status()
    until(browser, "document.title.startsWith('Not found')")
    browser.open(f"{service.url}/?limit=7", width=1280)
    browser.call("Network.clearBrowserCookies")
    until(browser, "location.pathname === '/ui/sign-in'")
    assert browser.ask("document.querySelector('[name=to]').value") == "/?limit=7"
    service.sign_in(browser)


def test_signing_in_with_the_form_opens_the_page_that_was_asked_for(service: Seeded, tmp_path_factory):
    with running_browser(tmp_path_factory.mktemp("other")) as browser:
        browser.open(f"{service.url}/ui/workers", width=360)
        assert browser.ask("location.pathname") == "/ui/sign-in"
        browser.ask(f"document.getElementById('key').value = {'k' * 40!r}; 1")
        browser.seen.clear()
        browser.ask("document.querySelector('form').requestSubmit(); 1")
        while not browser.events("Page.loadEventFired"):
            browser.call("Page.getLayoutMetrics")
        assert browser.ask("location.pathname") == "/ui/workers"
        assert browser.ask("document.cookie") == "", "scripts do not see it"
