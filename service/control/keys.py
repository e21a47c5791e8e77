"""Identifies callers, and what their keys allow.

A key is `qk_<id>_<secret>`. The store has only its sha256: 256 random bits need no slow hash.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from dataclasses import dataclass

from schemas.keys import Grants, IssuedKey, KeyView, NewKey, Scope
from service.errors import (
    STORE_AWAY,
    CallerRefused,
    Conflict,
    KeyRefused,
    OptionRefused,
    QuarryError,
    RequestError,
)
from service.settings import Settings
from service.store import Store, keys

KEY = re.compile(r"qk_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
OPERATOR = Grants(scopes=(Scope.ADMIN,))
OPERATORS_ID = "operator"
"""The id of the key in `QUARRY_ADMIN_KEY_FILE`; ids in the store are hex digits."""
KEY_CURE = (
    "send the header 'Authorization: Bearer qk_...', for which 'quarry' takes the key in QUARRY_KEY; "
    "an admin makes keys with 'quarry keys add'"
)
SHORTEST_ADMIN_KEY = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. `owner` is the key's name, None for the operator."""

    owner: str | None
    grants: Grants

    def may(self, scope: Scope) -> bool:
        """Return whether the key has a scope."""
        return self.grants.is_admin or scope in self.grants.scopes

    def sees(self, owner: str | None) -> bool:
        """Return whether the caller may see an owner's jobs and schedules."""
        return self.grants.is_admin or owner == self.owner

    def check_priority(self, priority: int) -> None:
        """Raise CallerRefused if the key's jobs may not have a priority."""
        most = self.grants.max_priority
        if most is not None and priority > most and not self.grants.is_admin:
            cure = f"ask for {most} or less"
            detail = f"the key allows a priority of {most} at most, got {priority}"
            raise CallerRefused(detail, field="priority", cure=cure)

    @property
    def sees_only(self) -> str | None:
        """The only owner whose jobs and schedules the caller sees, or None if the caller sees everybody's."""
        return None if self.grants.is_admin else self.owner


def issue(store: Store, settings: Settings, new: NewKey) -> IssuedKey:
    """Make a key.

    Raises Conflict if it would be the first and nobody could then make or revoke keys; RequestError for a
    folder that cannot exist, at which each request with the key would fail.
    """
    for field in ("source_roots", "model_roots"):
        for folder in getattr(new, field):
            if "\0" in folder:
                detail = f"no folder can have the name {folder!r}"
                raise RequestError(detail, field=field, cure="name it in UTF-8 and without NULs")
    lasts = new.is_admin and new.expires_at is None
    if not (lasts or settings.admin_key_file or store.read(keys.exists)):
        cure = "make one with the scope 'admin' first that does not expire, or set QUARRY_ADMIN_KEY_FILE"
        raise Conflict("with this key alone nobody could manage keys", field="scopes", cure=cure)
    key_id = secrets.token_hex(4)
    key = f"qk_{key_id}_{secrets.token_urlsafe(32)}"
    view = store.write(keys.add, key_id, _sha256(key), new)
    return IssuedKey(**view.model_dump(), key=key)


def revoke(store: Store, key_id: str) -> KeyView:
    """Revoke a key. Raises NotFound; QuarryError if it cannot be read, once it is revoked."""
    store.write(keys.revoke, key_id)
    try:
        return store.read(keys.view, key_id)
    except STORE_AWAY:
        raise
    except QuarryError as error:
        raise QuarryError(f"it is revoked, but {error.detail}", field=error.field, cure=error.cure) from error


def authenticate(store: Store, settings: Settings, key: str | None) -> Caller:
    """Return the caller who sends `key`; without one, on loopback before any keys exist, the operator.

    Raises KeyRefused.
    """
    if key is None:
        if needs_key(store, settings):
            raise KeyRefused("this service is used with an API key", field="Authorization", cure=KEY_CURE)
        return Caller(None, OPERATOR)
    return key_caller(store, settings, key)[1]


def key_caller(store: Store, settings: Settings, key: str) -> tuple[str, Caller]:
    """Return the id of a key and its caller. Raises KeyRefused."""
    form = KEY.fullmatch(key)
    for key_id in (*((form[1],) if form else ()), OPERATORS_ID):
        found = active_key(store, settings, key_id)
        if found is not None and hmac.compare_digest(_sha256(key), found[1]):
            return key_id, found[0]
    raise KeyRefused("the key is unknown, revoked or expired", field="Authorization", cure=KEY_CURE)


def active_key(store: Store, settings: Settings, key_id: str) -> tuple[Caller, str] | None:
    """Return the caller with a key and the key's sha256, or None if it is unknown, revoked or expired."""
    if key_id == OPERATORS_ID:
        given = settings.admin_key_file is not None
        return (Caller(None, OPERATOR), _sha256(admin_key(settings))) if given else None
    stored = store.read(keys.active, key_id)
    return None if stored is None else (Caller(stored[0].name, stored[0]), stored[1])


def needs_key(store: Store, settings: Settings) -> bool:
    """Return whether callers must have a key."""
    return bool(settings.admin_key_file) or not _is_loopback(settings.host) or store.read(keys.exists)


def check_bind(store: Store, settings: Settings) -> None:
    """Raise OptionRefused if the service may not listen on its address."""
    if settings.admin_key_file:
        admin_key(settings)
    elif not _is_loopback(settings.host) and not store.read(keys.exists):
        cure = "set QUARRY_ADMIN_KEY_FILE, or make a key with 'quarry keys add' while it listens on 127.0.0.1"
        detail = f"whoever reaches {settings.host} would own a service that has no API key"
        raise OptionRefused(detail, field="host", cure=cure)


def admin_key(settings: Settings) -> str:
    """Return the operator's own key, read at each use. Raises OptionRefused, which never quotes it."""
    field, cure = "QUARRY_ADMIN_KEY_FILE", "write one there: openssl rand -hex 32"
    assert settings.admin_key_file is not None  # noqa: S101
    try:
        key = settings.admin_key_file.read_text(encoding="latin-1").strip()
    except OSError as error:
        detail = f"the admin key's file cannot be read: {error.strerror}"
        raise OptionRefused(detail, field=field, cure="name a file that this user can read") from error
    if re.fullmatch(rf"[!-~]{{{SHORTEST_ADMIN_KEY},}}", key) is None:
        detail = f"the admin key is not one word of {SHORTEST_ADMIN_KEY} printable ASCII characters or more"
        raise OptionRefused(detail, field=field, cure=cure)
    return key


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name, whatever it resolves to
