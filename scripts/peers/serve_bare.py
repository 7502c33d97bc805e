#!/usr/bin/env python3
"""serve_bare.py PORT: a Starlette route that returns its body. A peer for scripts/bench.py."""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


async def echo(request: Request) -> Response:
    return Response(b'"' + await request.body() + b'"', media_type="application/json")


if __name__ == "__main__":
    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    uvicorn.run(app, port=int(sys.argv[1]), access_log=False)
