"""`GET /version`: which server this is. `GET /favicon.ico`: its icon, for a browser's tab."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from server.curl import ASSETS

ICON_TYPE = "image/svg+xml"
ICON = (ASSETS / "icon.svg").read_bytes()


class Version(Struct):
    version: str


async def version(request: Request) -> Version:
    return Version(__version__)


async def icon(request: Request) -> Response:
    return Response(ICON, media_type=ICON_TYPE, headers={"Cache-Control": "max-age=86400"})
