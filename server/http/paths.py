"""The path of a request as the routes have it, and whose clients read its responses."""

from starlette.types import Scope

ANTHROPIC_PATH = "/v1/messages"


def route_path(scope: Scope) -> str:
    """Return the path below `root_path`, which a server prefixes to each path."""
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", ""))
    return path if below and not below.startswith("/") else below


def is_anthropic(scope: Scope) -> bool:
    return route_path(scope).startswith(ANTHROPIC_PATH)
