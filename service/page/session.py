"""Identifies a page's viewer: the holder of a key, by a cookie that is derived from the key but is no key.

The cookie authorizes only the page's GETs. It names a key and is signed with the key's digest and a secret in
the data folder, so that it expires with the key, and neither can the cookie be forged from the database nor
the key be derived from the cookie.
"""

import hmac
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256

from fastapi import APIRouter, Request, Security
from fastapi.security import SecurityScopes

from schemas.keys import Scope
from service.api.auth import admitted
from service.api.routes.resources import BudgetOf, SettingsOf, StoreOf
from service.control.keys import Caller, active_key, authenticate, key_caller
from service.errors import writing
from service.host import kept_word
from service.page.answers import PageRoute
from service.settings import Settings
from service.store import Store

LASTS_S = 30 * 86_400
FORM = re.compile(r"([0-9a-f]{8}|operator)[.]([0-9]{10})[.]([0-9a-f]{64})")
SECRET_FILE = "page-secret"  # noqa: S105 - a file's name


def cookie_name(request: Request) -> str:
    """Return the cookie's name, which includes the port: a browser sends a cookie to every port of a host."""
    return "quarry_session_" + re.sub("[^a-z0-9]", "_", request.headers["host"].lower())


def begun(store: Store, settings: Settings, key: str) -> str:
    """Return the cookie for a key's holder. Raises KeyRefused, WriteFailed."""
    key_id, _ = key_caller(store, settings, key)
    until = f"{time.time() + LASTS_S:.0f}"
    return f"{key_id}.{until}.{_seal(settings, key_id, until, sha256(key.encode()).hexdigest())}"


def session_caller(store: Store, settings: Settings, request: Request) -> Caller:
    """Return the caller with the cookie; without a valid one, the caller without a key. Raises KeyRefused."""
    form = FORM.fullmatch(request.cookies.get(cookie_name(request), ""))
    if form is not None and int(form[2]) > time.time():
        found = active_key(store, settings, form[1])
        if found is not None and hmac.compare_digest(form[3], _seal(settings, form[1], form[2], found[1])):
            return found[0]
    return authenticate(store, settings, None)


def _seal(settings: Settings, key_id: str, until: str, key_sha256: str) -> str:
    with writing("the page's secret"):
        secret = kept_word(settings.data_dir.resolve(), SECRET_FILE)
    return hmac.new(secret.encode(), f"{key_id}.{until}.{key_sha256}".encode(), "sha256").hexdigest()


async def viewer(
    request: Request, required: SecurityScopes, store: StoreOf, settings: SettingsOf, budget: BudgetOf
) -> AsyncIterator[Caller]:
    """Yield the caller, as `service.api.auth.caller` does, but identified only by the cookie."""
    ask = partial(session_caller, store, settings, request)
    async with admitted(request, required, ask, budget) as sender:
        yield sender


def pages(*scopes: Scope) -> APIRouter:
    """Return a router of pages for callers whose keys have all these scopes."""
    dependencies = [Security(viewer, scopes=[*scopes])] if scopes else []
    return APIRouter(route_class=PageRoute, include_in_schema=False, dependencies=dependencies)
