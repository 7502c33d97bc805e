"""The command `onequeue`, as an installed package runs it."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from server import __version__
from tests.processes import ROOT, started


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel and install it without its dependencies; return the command's path."""
    folder = tmp_path_factory.mktemp("installed")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "server", "worker", "batching"):
        (tree / name).symlink_to(ROOT / name)
    build = "from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {build}", str(folder)],
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    )
    wheel = folder / done.stdout.split()[-1]
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    return site / "bin" / "onequeue"


@pytest.fixture
def environ(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a server.py of the user's; return it."""
    (tmp_path / "server.py").write_text("raise SystemExit('the wrong server')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(installed.parents[1]))
    return tmp_path


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("environ")
def test_the_installed_command_names_its_subcommands(installed: Path) -> None:
    assert run(installed, "--version").stdout == f"onequeue {__version__}\n"
    listed = run(installed, "--help").stdout
    assert run(installed).stdout == listed
    for name in ("serve", "calibrate", "load", "template", "build"):
        assert f"  {name} " in listed
        done = run(installed, name, "--help")
        assert done.returncode == 0
        assert f"onequeue {name}" in done.stdout
    wrong = run(installed, "server")
    assert wrong.returncode == 2
    assert "'server': serve, calibrate, load, template, cache, build" in wrong.stderr


def test_the_installed_command_serves_beside_a_module_of_the_same_name(
    installed: Path, environ: Path
) -> None:
    """With --reload, a child process imports the app by its name."""
    models = ["--chat-model", "none", "--embedding-model", "none"]
    command = [str(installed), "serve", *models, "--reload", "--port", "0"]
    with started(["env", "-C", str(environ), *command]) as (reloader, port):
        with httpx.Client(transport=httpx.HTTPTransport(retries=9), timeout=60) as client:
            client.get(f"http://127.0.0.1:{port}/health")  # once the child process listens
            page = client.get(f"http://127.0.0.1:{port}/", headers={"accept": "text/html"})
        reloader.terminate()  # it stops its child process
        reloader.wait(60)
        assert "<title>" in page.text


def test_the_load_test_needs_no_packages() -> None:
    code = "import sys; sys.argv[1:] = ['load', '--help']; from server.__main__ import main; main()"
    done = run(sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}")
    assert done.returncode == 0, done.stderr


def test_packages_are_typed() -> None:
    for package in ("server", "worker", "batching"):
        assert (ROOT / package / "py.typed").is_file()
