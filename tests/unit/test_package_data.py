"""pyproject.toml: an installed wheel has the page, the C++ sources, and what the code imports."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "batching", "worker")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DATA: dict[str, list[str]] = PYPROJECT["tool"]["setuptools"]["package-data"]
GLOBS = [(package, glob) for package, globs in PACKAGE_DATA.items() for glob in globs]


@pytest.mark.parametrize(("package", "glob"), GLOBS)
def test_every_glob_of_package_data_matches_files(package: str, glob: str) -> None:
    assert any(path.is_file() for path in (ROOT / package).glob(glob))


def test_every_data_file_of_a_package_is_package_data() -> None:
    data = {path for package, glob in GLOBS for path in (ROOT / package).glob(glob)}
    files = {
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert files == {path for path in data if path.is_file()}
    kinds = {path.suffix for path in files}
    assert {".html", ".css", ".js", ".cpp", ".h", ".safetensors"} <= kinds


def test_every_folder_with_modules_is_a_package() -> None:
    """setuptools finds packages by their __init__.py."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_every_import_is_a_requirement() -> None:
    """Also of functions, which a start does not run; not only as a requirement of another one."""
    project, distributions = PYPROJECT["project"], packages_distributions()
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
