"""`quarry keys`: who may use a running service."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from schemas.keys import KeyView, NewKey, Scope
from service.cli.console import EXIT_NOT_COMPLETE, AsJson, complain, group, show_list
from service.cli.server import SERVER, Quarry
from service.control.request_body import parse_body

app = group("keys", "Make, list and revoke the API keys of a running service, as its admin.")


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The owner of its jobs and schedules.")],
    scope: Annotated[list[Scope], typer.Option(help="What the key may be used for; may be repeated.")],
    namespace: Annotated[
        list[str], typer.Option(help="A Hub namespace to push to and to read private data from; '*': all.")
    ] = [],  # noqa: B006 - typer's form of an option that may be repeated
    source_root: Annotated[list[str], typer.Option(help="A folder that file sources may be read from.")] = [],  # noqa: B006
    model_root: Annotated[
        list[str], typer.Option(help="A folder that local models may be loaded from.")
    ] = [],  # noqa: B006
    max_jobs: Annotated[int | None, typer.Option(min=1, help="Most jobs that have not ended.")] = None,
    max_priority: Annotated[
        int | None, typer.Option(min=-100, max=100, help="The highest priority of its jobs.")
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Most bytes of its jobs' shards, requests and rejects, and posted samples."),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most requests per minute to each API process.")
    ] = None,
    days: Annotated[float | None, typer.Option(min=0, max=36_500, help="Days until it expires.")] = None,
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. It is not shown again."""
    document = {
        "name": name,
        "scopes": scope,
        "hub_namespaces": namespace,
        "source_roots": source_root,
        "model_roots": model_root,
        "max_jobs": max_jobs,
        "max_priority": max_priority,
        "max_bytes": max_bytes,
        "requests_per_minute": requests_per_minute,
        "expires_at": None if days is None else datetime.now(UTC) + timedelta(days=days),
    }
    new = parse_body(NewKey, document)
    issued = quarry.add_key(new)
    print(issued.model_dump_json() if as_json else issued.key)


@app.command("list")
def list_keys(quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """List keys, oldest first, including revoked and expired ones."""
    listed = quarry.keys()
    _show(listed.keys, as_json)
    # One that is revoked does no harm any more, and stays.
    problems = [one.problem for one in listed.unreadable if one.revoked_at is None]
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(EXIT_NOT_COMPLETE)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as 'list' prints it.")],
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Revoke a key; its owner's jobs continue."""
    _show([quarry.revoke_key(key_id)], as_json)


def _show(keys: Sequence[KeyView], as_json: bool) -> None:
    show_list(keys, as_json, ("id", "name", "state", "scopes"), _fields)


def _fields(key: KeyView) -> tuple[str, ...]:
    if key.revoked_at is not None:
        state = f"revoked {key.revoked_at:%Y-%m-%d}"
    elif key.expires_at is not None:
        state = f"until {key.expires_at:%Y-%m-%d}"
    else:
        state = "no end"
    return key.id, key.name, state, " ".join(key.scopes)
