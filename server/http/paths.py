"""The path of a request as the routes have it."""

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """Return the path below `root_path`, which a server prefixes to each path."""
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", ""))
    return path if below and not below.startswith("/") else below
