"""`GET /version`: which server this is. `GET /favicon.ico`: its icon, for a browser's tab."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from server import __version__

ICON_TYPE = "image/svg+xml"
# Requests that wait, and a worker.
ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">\
<rect width="16" height="16" rx="3" fill="#2b6cb0"/><g fill="#fff">\
<rect x="2" y="4" width="2" height="8"/><rect x="5" y="4" width="2" height="8"/>\
<circle cx="11" cy="8" r="3"/></g></svg>"""


class Version(Struct):
    version: str


async def version(request: Request) -> Version:
    return Version(__version__)


async def icon(request: Request) -> Response:
    return Response(ICON, media_type=ICON_TYPE, headers={"Cache-Control": "max-age=86400"})
