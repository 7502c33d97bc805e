"""The command `onequeue`, also `python -m onequeue`, and the app for `uvicorn onequeue:app`.

A project may have folders of its own named `batching`, `server` or `worker`, which `python -m`,
uvicorn and PYTHONPATH put first on sys.path. This module puts the packages beside it first.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PACKAGES = ("batching", "server", "worker")


def main() -> None:
    find_packages()
    from server.__main__ import main

    main()


def find_packages() -> None:
    """Put the packages beside this file first. Raises ImportError if others are imported."""
    others = {name: origin for name in PACKAGES if (origin := origin_of(name)) != FOLDER / name}
    for name in others.keys() & sys.modules.keys():
        raise ImportError(
            f"the package `{name}` of {others[name]} is imported, which onequeue has too: "
            "rename it, or run onequeue in a process of its own"
        )
    if others:
        sys.path.insert(0, str(FOLDER))


def origin_of(name: str) -> Path | None:
    """Return the folder that a package is imported from."""
    spec = find_spec(name)
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    find_packages()
    import server.app

    return server.app.app


if __name__ == "__main__":
    main()
