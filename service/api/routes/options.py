"""Refuses options of routes that take none, so that a misspelt one is not silently ignored."""

from typing import Annotated

from fastapi import Body, Depends, Query

from schemas.base import Wire


class NoOptions(Wire):
    """The query or body of a route that takes none: any field is refused."""


async def no_query(query: Annotated[NoOptions, Query()]) -> None:
    """Refuse any query parameter."""


async def no_options(
    query: Annotated[NoOptions, Query()], body: Annotated[NoOptions | None, Body()] = None
) -> None:
    """Refuse any query parameter, and any body but an empty object."""


NO_QUERY, NO_OPTIONS = [Depends(no_query)], [Depends(no_options)]
