"""The files that pages load: one style sheet, one script, one icon."""

from typing import Annotated, Literal

from fastapi import Path, Response

from service.page.answers import FILES
from service.page.session import pages

router = pages()


@router.get("/ui/static/{digest}/{name}")
async def static_file(
    digest: Annotated[str, Path(max_length=64)], name: Literal["page.css", "page.js", "icon.svg"]
) -> Response:
    """Send a file; its address holds its digest, so that a browser may keep it."""
    content, media_type = FILES[name]
    return Response(
        content, media_type=media_type, headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )
