"""API keys: made, listed and revoked by an admin."""

from typing import Annotated

from fastapi import APIRouter, Path, Security

from schemas.keys import IssuedKey, KeyList, KeyView, NewKey, Scope
from service.api.auth import caller
from service.api.json_route import JsonRoute
from service.api.problems import problem_responses
from service.api.routes.options import NO_QUERY
from service.api.routes.resources import SettingsOf, StoreOf
from service.control.keys import issue, revoke
from service.store import keys

router = APIRouter(
    prefix="/keys",
    tags=["keys"],
    dependencies=[Security(caller, scopes=[Scope.ADMIN]), *NO_QUERY],
    responses=problem_responses(401, 403, 429),
    route_class=JsonRoute,
)


@router.post("", status_code=201, responses=problem_responses(409, 415, 422))
def add_key(new: NewKey, store: StoreOf, settings: SettingsOf) -> IssuedKey:
    """Make a key. Only this answer holds its secret."""
    return issue(store, settings, new)


@router.get("", responses=problem_responses(422))
def list_keys(store: StoreOf) -> KeyList:
    """List all keys, without their secrets."""
    return store.read(keys.every)


@router.delete("/{key_id}", responses=problem_responses(404, 422))
def revoke_key(key_id: Annotated[str, Path(pattern=r"^[0-9a-f]{8}$")], store: StoreOf) -> KeyView:
    """Revoke a key. Its owner's jobs continue, but no longer read what only this key allowed.

    Without a valid key, an owner's schedules make no jobs.
    """
    return revoke(store, key_id)
