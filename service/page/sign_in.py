"""Signing in: a key is entered once and replaced by a cookie on the pages. This is the page's only POST."""

import re
from urllib.parse import parse_qs

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool

from service.api.routes.resources import SettingsOf, StoreOf
from service.control.keys import Caller
from service.errors import KeyRefused, RequestError
from service.page.answers import SIGN_IN, page
from service.page.session import LASTS_S, begun, cookie_name, pages, session_caller

HERE = re.compile(r"/(?:ui/[a-z0-9/._-]*)?(?:[?][!-~]{0,2000})?")
"""Where a sign-in may redirect to: a page of this service."""

MAX_FIELDS = 4

router = pages()


def _form(request: Request, to: str, problem: str | None, who: Caller | None, status: int) -> Response:
    response = page(
        request,
        "sign_in.html",
        status,
        to=to,
        problem=problem,
        signed_in=who,
        by_cookie=cookie_name(request) in request.cookies,
    )
    # With "no-referrer" a browser would not reveal that the form was sent from this page.
    response.headers["Referrer-Policy"] = "same-origin"
    return response


def _safe(to: str) -> str:
    return to if HERE.fullmatch(to) else "/"


@router.get(SIGN_IN)
def show_form(request: Request, store: StoreOf, settings: SettingsOf, to: str = "/") -> Response:
    """Show the form for a key, or the current caller with the option to sign out."""
    try:
        who: Caller | None = session_caller(store, settings, request)
    except KeyRefused:
        who = None
    return _form(request, _safe(to), None, who, 200)


@router.post(SIGN_IN)
async def sign_in(request: Request, store: StoreOf, settings: SettingsOf) -> Response:
    """Set the cookie for the key in the form, or delete it if the form has no key.

    `service.api.gate` has already checked that the form was sent from a page of this service.
    """
    try:
        fields = parse_qs((await request.body()).decode("latin-1"), max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise RequestError(f"the form has more than {MAX_FIELDS} fields") from error
    key, to = fields.get("key", [""])[0].strip(), _safe(fields.get("to", ["/"])[0])
    response: Response = RedirectResponse(to if key else SIGN_IN, 303)
    name, is_tls = cookie_name(request), request.headers.get("origin", "").startswith("https://")
    if not key:
        response.delete_cookie(name, secure=is_tls, httponly=True, samesite="strict")
        return response
    try:
        cookie = await run_in_threadpool(begun, store, settings, key)
    except KeyRefused as refused:
        return _form(request, to, refused.detail, None, 401)
    response.set_cookie(name, cookie, LASTS_S, path="/", secure=is_tls, httponly=True, samesite="strict")
    return response
