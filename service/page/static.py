"""The files that pages load: one style sheet, one script, one icon."""

from fastapi import Response

from service.errors import NotFound
from service.page.answers import DIGESTS, FILES
from service.page.session import pages

router = pages()


@router.get("/ui/static/{digest}/{name}")
async def static_file(digest: str, name: str) -> Response:
    """Send a file; its URL has its digest, so that a browser may cache it."""
    if DIGESTS.get(name) != digest:
        raise NotFound("this version of the service has no such file", cure="load the page anew")
    content, media_type = FILES[name]
    return Response(
        content, media_type=media_type, headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )


@router.get("/ui/{path:path}")
async def unknown(path: str) -> Response:
    """Answer any other URL with an error page. Must be the last route."""
    raise NotFound("there is no such page")
