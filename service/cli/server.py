"""Options of every command that talks to a running service."""

from typing import Annotated

import typer

from service.client.clients import DEFAULT_SERVER

Server = Annotated[str, typer.Option(envvar="QUARRY_SERVER", help="Base URL of the service.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]

__all__ = ["DEFAULT_SERVER", "AsJson", "Server"]
