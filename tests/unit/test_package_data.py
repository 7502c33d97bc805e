"""The package-data of pyproject.toml: an installed wheel has the page and the C++ sources."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "batching", "worker")
PACKAGE_DATA: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "setuptools"
]["package-data"]
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
