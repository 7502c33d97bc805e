"""pyproject.toml requires what the code imports. scripts/release checks the files of a wheel."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "batching", "worker")


def test_every_import_is_a_requirement() -> None:
    """Also of functions, which a start does not run; not only as a requirement of another one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    distributions = packages_distributions()
    extras = [e for name, e in project["optional-dependencies"].items() if name != "dev"]
    required = {normalized(text) for group in [project["dependencies"], *extras] for text in group}
    required.add("triton")  # torch for GPUs brings it along
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for module in imported(path) - {*PACKAGES, *sys.stdlib_module_names}:
            names = {normalized(name) for name in distributions.get(module, [module])}
            assert names & required, f"{path.relative_to(ROOT)} imports {module}"


def imported(path: Path) -> set[str]:
    """Return the top-level modules that a file imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
    return {module.split(".")[0] for module in modules}


def normalized(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
