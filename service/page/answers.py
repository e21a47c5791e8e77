"""What all pages share: rendered templates, errors as pages, and security headers."""

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment

from schemas.job import ENDED_JOB_STATES, JOB_MOVES, RESTING_JOB_STATES, Problem
from schemas.names import shown_model
from service.api.head_route import HeadRoute
from service.api.problems import HEADERS, invalid_parameters, noted
from service.client.clients import DEFAULT_SERVER
from service.errors import KeyRefused, QuarryError
from service.page.progress import share_done, waits_for
from service.report.templates import REPORT_CSS, templates

HERE = Path(__file__).parent
SIGN_IN = "/ui/sign-in"
SAFE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
STYLE = REPORT_CSS.encode() + (HERE / "static" / "page.css").read_bytes()
FILES = {
    "page.css": (STYLE, "text/css"),
    "page.js": ((HERE / "static" / "page.js").read_bytes(), "text/javascript"),
    "icon.svg": ((HERE / "static" / "icon.svg").read_bytes(), "image/svg+xml"),
}
"""The static files of the pages, with their media types."""
DIGESTS = {name: sha256(content).hexdigest()[:16] for name, (content, _) in FILES.items()}
LENGTHS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class PageRoute(HeadRoute):
    """A route of the page: errors are pages, too, and without a valid key it redirects to the sign-in."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the request handler."""
        answer = super().get_route_handler()

        async def answering(request: Request) -> Response:
            asked = str(request.url.replace(scheme="", netloc="", fragment=""))
            try:
                response = await answer(request)
            except KeyRefused:
                response = RedirectResponse(f"{SIGN_IN}?{urlencode({'to': asked})}", 303)
            except QuarryError as error:
                response = _problem_page(request, noted(request, error))
            except RequestValidationError as error:
                response = _problem_page(request, invalid_parameters(error).problem())
            for name, value in SAFE.items():
                response.headers.setdefault(name, value)
            return response

        return answering


def page(request: Request, template: str, status: int = 200, **context: object) -> HTMLResponse:
    """Render a template as a page; untrusted content is escaped."""
    who, path = getattr(request.state, "caller", None), request.url.path
    # Both headers are only displayed, and `service.api.gate` has checked the host.
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else "http"
    base = f"{scheme}://{request.headers['host']}"
    text = TEMPLATES.get_template(template).render(path=path, who=who, base=base, **context)
    return HTMLResponse(text, status)


def _problem_page(request: Request, problem: Problem) -> HTMLResponse:
    response = page(request, "problem.html", problem.status, problem=problem)
    response.headers.update(HEADERS.get(problem.status, {}))
    return response


def ago(at: datetime) -> str:
    """Return how long ago a time was, or how far ahead it is: `3 min ago`, `in 2 h`."""
    passed_s = (datetime.now(UTC) - at).total_seconds()
    text = length_of_time(abs(passed_s))
    return f"{text} ago" if passed_s >= 0 else f"in {text}"


def length_of_time(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least two: `90 s`, `3 min`, `26 h`."""
    unit_s, unit = next((one for one in LENGTHS if seconds >= 2 * one[0]), LENGTHS[-1])
    return f"{seconds / unit_s:.0f} {unit}"


def _templates() -> Environment:
    environment = templates(HERE / "templates")
    environment.filters |= {"ago": ago, "length_of_time": length_of_time, "model": shown_model}
    environment.globals |= {"digests": DIGESTS, "sign_in": SIGN_IN}
    environment.globals |= {"ended": ENDED_JOB_STATES, "resting": RESTING_JOB_STATES, "moves": JOB_MOVES}
    environment.globals |= {"share_done": share_done, "waits_for": waits_for}
    environment.globals["default_server"] = DEFAULT_SERVER
    return environment


TEMPLATES = _templates()
