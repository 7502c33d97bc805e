"""Folders form layers: CONTRIBUTING.md describes the same order. pyproject.toml requires what the
code imports."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WEB = {"starlette", "uvicorn", "prometheus_client"}
TORCH = {"torch", "transformers"}

# From the bottom up: a folder imports from itself and from folders listed above it in this table.
# The second column: libraries that the folder must not import.
LAYERS: dict[str, set[str]] = {
    "batching": WEB | TORCH | {"threading", "time", "anyio"},
    "worker/media": WEB | TORCH,
    "worker/messages": WEB | TORCH,
    "worker": WEB | TORCH,
    "worker/device": WEB,
    "worker/text": WEB,
    "worker/text/chat_template": WEB,
    "worker/model/attention": WEB,
    "worker/model": WEB,
    "worker/backends/cpu": WEB,
    "worker/backends/cuda": WEB,
    "worker/backends": WEB,
    "worker/grammar": WEB,
    "worker/engines/pipeline": WEB,
    "worker/engines/speech": WEB,
    "worker/vision": WEB,
    "worker/engines/generation": WEB,
    "worker/engines/embedding": WEB,
    "server/core": TORCH,
    "server/http": TORCH,
    "server/web": TORCH,
    "server/apis/openai": TORCH,
    "server/apis/openai/audio": TORCH,
    "server/apis/openai/embedding": TORCH,
    "server/apis/openai/responses": TORCH,
    "server/apis/openai/batches": TORCH,
    "server/apis/openai/decisions": TORCH,
    "server/apis/pipeline": TORCH,
    "server/apis/anthropic": TORCH,
    "server/openapi": TORCH,
    "server": TORCH,
    "server/commands/load_test": WEB | TORCH,
    "server/commands": set(),  # `template` loads a tokenizer
}
# What a plain model and a plain request do not use: the core does not import it.
OPTIONAL = (
    "server/apis/anthropic", "server/apis/openai/adapters", "server/apis/openai/audio",
    "server/apis/openai/batches", "server/apis/openai/database", "server/apis/openai/decisions",
    "server/apis/openai/embedding", "server/apis/openai/jobs", "server/apis/openai/postgres",
    "server/apis/openai/responses", "server/apis/openai/shared_limits", "server/apis/openai/store",
    "server/apis/pipeline/decisions", "server/cluster", "server/commands", "server/core/telemetry",
    "server/http/fetch", "server/openapi", "server/web", "worker/adapter_folder",
    "worker/backends", "worker/engines/embedding", "worker/engines/generation/content_logprobs",
    "worker/engines/generation/decisions", "worker/engines/generation/text_pipeline",
    "worker/engines/speech", "worker/grammar", "worker/model/attention/bidirectional",
    "worker/model/compiling", "worker/model/logit_changes", "worker/model/multimodal_batch",
    "worker/text/stop_strings", "worker/vision",
)  # fmt: skip
# A switch of the layers in worker/backends/cpu, not the layers.
NOT_OPTIONAL = {"worker.backends.cpu.torch_only"}
MAX_CORE_LINES = 15_000
ONE_LAYER = ("worker/model", "worker/backends")
# The program's entry point imports the commands, which import the app.
ENTRY_POINT = ROOT / "server" / "__main__.py"
# server/ starts without torch: the app and the commands import these folders inside functions.
TORCH_FOLDERS = {folder for folder, banned in LAYERS.items() if not banned >= TORCH}


def folder_of(module: str) -> str:
    """Return the folder of one of our modules, or the folder that the package itself is."""
    path = ROOT / module.replace(".", "/")
    return str((path if path.is_dir() else path.parent).relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, module_level: bool = False) -> set[str]:
    found: set[str] = set()
    for node in parsed(path).body if module_level else ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = {name for name in names if (ROOT / f"{name.replace('.', '/')}.py").is_file()}
            found |= ours or {node.module}
    return found


def test_every_folder_has_its_layer() -> None:
    here = {
        str(path.parent.relative_to(ROOT))
        for package in ("batching", "worker", "server")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert here == set(LAYERS)


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_from_lower_layers_only(folder: str) -> None:
    lower = [*LAYERS][: [*LAYERS].index(folder) + 1]
    if folder.startswith(ONE_LAYER):  # a backend extends the model, which chooses it at load
        lower += [other for other in LAYERS if other.startswith(ONE_LAYER)]
    for path in (ROOT / folder).glob("*.py"):
        if path == ENTRY_POINT:
            continue
        for module in imports(path):
            top = module.split(".")[0]
            assert top not in LAYERS[folder], f"{path.name} imports {module}"
            if top in ("batching", "worker", "server") and module != "server":  # its version
                assert folder_of(module) in lower, f"{path.name} imports {module}"


@pytest.mark.parametrize("folder", [folder for folder in LAYERS if "torch" in LAYERS[folder]])
def test_the_server_imports_torch_inside_functions_only(folder: str) -> None:
    for path in (ROOT / folder).glob("*.py"):
        for module in imports(path, module_level=True):
            if module.startswith("worker"):
                assert folder_of(module) not in TORCH_FOLDERS, f"{path.name} imports {module}"


def test_only_settings_and_preflight_read_the_environment() -> None:
    for folder in LAYERS:
        for path in (ROOT / folder).glob("*.py"):
            if path.name not in ("settings.py", "preflight.py"):
                assert "os.environ" not in path.read_text(), path.name


def test_the_tracer_alone_tells_whether_a_call_is_traced() -> None:
    """torch.compiler.is_compiling() is one flag of the process, and other threads serve."""
    for path in (ROOT / "worker").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            name = getattr(node, "attr", getattr(node, "id", ""))
            assert name not in ("is_compiling", "_is_compiling_flag"), f"{path}:{node.lineno}"  # type: ignore[attr-defined]


def test_no_class_name_occurs_twice() -> None:
    names: dict[str, str] = {}
    for folder in LAYERS:
        for path in (ROOT / folder).glob("*.py"):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef):
                    assert node.name not in names, f"{node.name}: {path}, {names.get(node.name)}"
                    names[node.name] = str(path)


@cache
def core() -> dict[str, int]:
    """Return the files of the core, each with the lines that CONTRIBUTING.md states of its row."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (`.+`) \| .+ \| ([\d,]+) \|$", text, re.MULTILINE)
    return {
        f"{folder}/{name}.py": int(lines.replace(",", ""))
        for folder, names, lines in rows
        for name in re.findall(r"`(\w+)`", names)
    }


def test_the_core_imports_no_optional_part() -> None:
    for path in core():
        for module in imports(ROOT / path, module_level=True) - NOT_OPTIONAL:
            names = module.replace(".", "/")
            parts = [part for part in OPTIONAL if names == part or names.startswith(f"{part}/")]
            assert not parts, f"{path} imports {module}"


def test_optional_parts_are_there_and_not_in_the_core() -> None:
    for part in OPTIONAL:
        assert (ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file(), part
        assert f"{part}.py" not in core()
        assert not any(path.startswith(f"{part}/") for path in core())


def test_the_core_can_be_read() -> None:
    counts = {path: len((ROOT / path).read_text().splitlines()) for path in core()}
    assert 0 < sum(counts.values()) <= MAX_CORE_LINES
    for folder in {str(Path(path).parent) for path in counts}:
        files = [path for path in counts if str(Path(path).parent) == folder]
        actual, stated = sum(counts[path] for path in files), core()[files[0]]
        assert actual == pytest.approx(stated, rel=0.2, abs=60), f"CONTRIBUTING.md: {folder}"


def test_no_imports_in_a_circle() -> None:
    graph = {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", "."): imports(path, True)
        for package in ("batching", "worker", "server")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    left = set(graph)
    while free := {module for module in left if not graph[module] & left}:
        left -= free
    assert not left, "each of these imports another one, in a circle"


def test_every_import_is_a_requirement() -> None:
    """Also of functions, which a start does not run; not only as a requirement of another one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    distributions, ours = packages_distributions(), {"server", "batching", "worker"}
    extras = [e for name, e in project["optional-dependencies"].items() if name != "dev"]
    required = {normalized(text) for group in [project["dependencies"], *extras] for text in group}
    required.add("triton")  # torch for GPUs brings it along
    for path in (path for name in ours for path in (ROOT / name).rglob("*.py")):
        modules = {module.split(".")[0] for module in imports(path)}
        for module in modules - {*ours, *sys.stdlib_module_names}:
            names = {normalized(name) for name in distributions.get(module, [module])}
            assert names & required, f"{path.relative_to(ROOT)} imports {module}"


def normalized(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
