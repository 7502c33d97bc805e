"""Who may import whom, by folders: CONTRIBUTING.md has the same as a table."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WEB = {"starlette", "uvicorn", "prometheus_client"}
TORCH = {"torch", "transformers"}
WORKER = {"batching", "worker"}
OPENAI = {f"server/openai{folder}" for folder in ("", "/audio", "/responses", "/decisions")}
# Of our own, a folder imports from itself and from these; of libraries, none of those.
FOLDERS: dict[str, tuple[set[str], set[str]]] = {
    "batching": (set(), WEB | TORCH | {"threading", "time", "anyio"}),
    "worker": ({"batching"}, WEB | TORCH),
    "worker/model": (WORKER, WEB),
    "worker/speech": (WORKER | {"worker/model"}, WEB),
    "worker/pipeline": (WORKER | {"worker/model", "worker/speech"}, WEB),
    "worker/embedding": (WORKER | {"worker/model", "worker/pipeline", "worker/text"}, WEB),
    "worker/vision": (WORKER | {"worker/model"}, WEB),
    "worker/text": (WORKER, WEB),
    "worker/grammar": (WORKER | {"worker/text", "worker/model"}, WEB),
    "worker/generation": (
        WORKER | {"worker/text", "worker/grammar", "worker/model", "worker/vision"},
        WEB,
    ),
    "server": (WORKER | {"server/http", *OPENAI}, TORCH),
    "server/calibration": (WORKER | {"server", "server/http"}, TORCH),
    "server/http": (WORKER | {"server"}, TORCH),
    "server/openai": (WORKER | {"server", "server/http"}, TORCH),
    "server/openai/audio": (WORKER | {"server", "server/http", "server/openai"}, TORCH),
    "server/openai/responses": (WORKER | {"server", "server/http", "server/openai"}, TORCH),
    "server/openai/decisions": (WORKER | {"server", "server/http", *OPENAI}, TORCH),
}


def folder_of(module: str) -> str:
    """The folder that a module of ours lies in, or that it is."""
    path = ROOT / module.replace(".", "/")
    return str((path if path.is_dir() else path.parent).relative_to(ROOT))


def imports(path: Path, module_level: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if module_level else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_every_folder_has_its_rule() -> None:
    here = {
        str(path.parent.relative_to(ROOT))
        for package in ("batching", "worker", "server")
        for path in (ROOT / package).rglob("*.py")
    }
    assert here == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    ours, libraries = FOLDERS[folder]
    for path in (ROOT / folder).glob("*.py"):
        for module in imports(path):
            top = module.split(".")[0]
            assert top not in libraries, f"{path.name} imports {module}"
            if top in ("batching", "worker", "server") and not _deferred(path, module):
                assert folder_of(module) in ours | {folder}, f"{path.name} imports {module}"


def _deferred(path: Path, module: str) -> bool:
    """The server loads models on the worker's thread: it imports that code inside a function."""
    return path.parent.name == "server" and module not in imports(path, module_level=True)


def test_the_environment_is_read_in_settings_alone() -> None:  # but for uvicorn's WEB_CONCURRENCY
    for folder in FOLDERS:
        for path in (ROOT / folder).glob("*.py"):
            if path.name not in ("settings.py", "preflight.py"):
                assert "os.environ" not in path.read_text(), path.name
