"""Who may import whom: batching ← worker ← server, torch in worker alone, HTTP in server alone."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WEB = {"starlette", "uvicorn", "prometheus_client"}
TORCH = {"torch", "transformers"}
FORBIDDEN = {
    "batching": WEB | TORCH | {"worker", "server", "threading", "time", "anyio"},
    "worker": WEB | {"server"},
    "server": TORCH,
}


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


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_imports_only_what_it_may(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert len(paths) > 3
    for path in paths:
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & FORBIDDEN[package], path.name


def test_the_server_starts_without_loading_torch() -> None:
    """Of worker/ it imports the files that stand beside the folders; torch is in the folders."""
    for path in (ROOT / "worker").glob("*.py"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & TORCH, path.name
        folders = {name for name in imports(path) if name.count(".") > 1}
        assert not {name for name in folders if name.startswith("worker")}, path.name
    for path in (ROOT / "server").rglob("*.py"):
        from_worker = {name for name in imports(path, True) if name.startswith("worker")}
        assert all(name.count(".") == 1 for name in from_worker), path.name


def test_the_environment_is_read_in_settings_alone() -> None:  # but for uvicorn's WEB_CONCURRENCY
    for package in FORBIDDEN:
        for path in (ROOT / package).rglob("*.py"):
            if path.name not in ("settings.py", "preflight.py"):
                assert "os.environ" not in path.read_text(), path.name


def test_grammars_build_on_text_and_the_engine_on_both() -> None:
    def folders(name: str) -> set[str]:
        paths = (ROOT / "worker" / name).glob("*.py")
        found = {each for path in paths for each in imports(path) if each.startswith("worker.")}
        return {each.split(".")[1] for each in found if each.count(".") > 1}

    assert not folders("text") & {"grammar", "generation", "model", "pipeline"}
    assert not folders("grammar") & {"generation", "pipeline"}
