"""The pages of docs/guides, and docs/install.md, do what they say.

Each `bash` and `python` block of a guide runs, in the order of the page, against one server. Its
models are small ones under the names that the guides use. Blocks behind `<!-- not run -->` need a
download, a program that is not installed, or a start of their own: their syntax, flags, models and
routes are checked. On the production page the start command runs too.
"""

import base64
import csv
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from PIL import Image

from server.commands.calibrate import calibrate_command
from server.commands.load_test.arguments import parse_args
from server.commands.serve import serve_command
from server.core.settings import Settings, split_entries, split_entry
from tests import processes, tiny, tiny_multimodal
from tests.documents import FENCE, LOCAL, Block, blocks_of
from tests.processes import ROOT, started
from tests.real import checkpoints
from tests.serving import wait_until
from worker.backends.cpu.linear_layers import INT4_BYTES

# Nothing reads the log, which is a pipe: lines of requests would fill it.
SERVER = [*processes.SERVER, "--no-access-log"]
DEMO = ROOT / "worker" / "demo"
INSTALL = ROOT / "docs" / "install.md"
MIGRATE = ROOT / "docs" / "guides" / "migrate.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
ROUTE = re.compile(rf"{LOCAL}(/[\w/]*)")
MAX_LINES = 110  # about two screens
STARTS_ITS_SERVER = "production.md"
# Variables of the environment that other libraries read.
OTHERS = {"OMP_NUM_THREADS", "HF_TOKEN", "HF_HOME", "HF_HUB_CACHE"}
OTHERS |= {"TORCHINDUCTOR_CACHE_DIR", "OTEL_EXPORTER_OTLP_ENDPOINT"}
OTHER_FLAGS = {"--fail", "--retry", "--gpus"}  # of curl and docker

CHAT, MINERU = "Qwen/Qwen3-0.6B", "opendatalab/MinerU2.5-2509-1.2B"
PADDLE = "PaddlePaddle/PaddleOCR-VL"
CLASSIFIER = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
EMBEDDING = "sentence-transformers/all-MiniLM-L6-v2"
RERANKER = "cross-encoder/ms-marco-MiniLM-L6-v2"
WHISPER = "openai/whisper-small"


CHECKED = [block for page in (*GUIDES, INSTALL) for block in blocks_of(page) if not block.runs]


@cache
def reranker() -> Path:
    return tiny.saved(
        "guide-reranker", tiny.encoder(tiny.Bert, "SequenceClassification", num_labels=1)()
    )


@cache
def models() -> dict[str, list[tuple[str, Path]]]:
    """Return, by flag, the names of the guides' models and the folders that serve as them."""
    return {
        "--chat-model": [
            (CHAT, DEMO / "chat"),
            (PADDLE, tiny_multimodal.folder("paddleocr-vl")),
            (MINERU, tiny_multimodal.folder("qwen2-vl")),
        ],
        "--pipeline-model": [(CLASSIFIER, tiny.folder("bert-classify"))],
        "--embedding-model": [(EMBEDDING, DEMO / "embedding")],
        "--rerank-model": [(RERANKER, reranker())],
        "--transcription-model": [(WHISPER, DEMO / "speech")],
    }


def serve_arguments(served: Mapping[str, list[tuple[str, Path]]]) -> list[str]:
    lists = {
        flag: ",".join(f"{name}={folder}" for name, folder in entries)
        for flag, entries in served.items()
    }
    return [argument for pair in lists.items() for argument in pair]


def is_ready(port: int) -> bool:
    return httpx.get(f"http://localhost:{port}/ready").status_code == 200


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Run a server with all models of the guides, and yield its port."""
    command = [*SERVER, *serve_arguments(models()), "--port", "0"]
    batches = str(tmp_path_factory.mktemp("batches"))
    with started(command, BATCH_DIR=batches) as (_, port):
        wait_until(partial(is_ready, port))
        yield port


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    onequeue = folder / "onequeue"
    onequeue.write_text(f'#!/bin/sh\nexec {sys.executable} -m server "$@"\n')
    onequeue.chmod(0o755)
    return folder


# ── running a page ──


def write_reviews(folder: Path) -> None:
    with (folder / "reviews.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "text"])
        rows.writerows([n, f'number {n}, a "quoted"\nreview'] for n in range(300))


def write_recordings(folder: Path) -> None:
    (folder / "recordings").mkdir()
    for name, digits in (("monday", "314"), ("tuesday", "15")):
        command = ["scripts/demo_tones.py", f"{folder}/recordings/{name}.mp3", digits]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


def write_page(folder: Path) -> None:
    Image.new("RGB", (80, 60), (200, 200, 200)).save(folder / "page.png")


INPUTS: dict[str, Callable[[Path], None]] = {
    "csv.md": write_reviews,
    "transcribe.md": write_recordings,
    "documents.md": write_page,
}


def run_block(block: Block, folder: Path, programs: Path, port: int) -> str:
    text = block.text.replace(LOCAL, f"localhost:{port}")
    shell = ["bash", "-euo", "pipefail", "-c", text]
    command = shell if block.language == "bash" else [sys.executable, "-c", text]
    path = f"{programs}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", text, re.MULTILINE)
    assert not expected or done.stdout.splitlines() == expected
    return done.stdout


def own_server(block: Block, folder: Path) -> list[str]:
    """Return the start command of a block, for its folder and a free port."""
    [_, _, name, *arguments] = shlex.split(block.text.replace("\\\n", " "))
    [model] = [folder for known, folder in models()["--chat-model"] if known == name]
    command = [*SERVER, f"{name}={model}", "--port", "0"]
    return [*command, *(str(folder / a) if (folder / a).is_file() else a for a in arguments)]


def run_page(page: Path, folder: Path, programs: Path, port: int) -> str:
    """Run the blocks of a page in a folder; return what they print."""
    if page.name in INPUTS:
        INPUTS[page.name](folder)
    printed = ""
    with ExitStack() as stack:
        for block in blocks_of(page):
            if block.runs:
                printed += run_block(block, folder, programs, port)
            elif page.name == STARTS_ITS_SERVER and block.text.startswith("onequeue serve"):
                _, port = stack.enter_context(started(own_server(block, folder)))
                wait_until(partial(is_ready, port))
    return printed


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in GUIDES])
def test_a_guide_runs(page: Path, port: int, programs: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, programs, port)
    if page.name == "csv.md":
        with (tmp_path / "labelled.csv").open(newline="") as file:
            assert [row["id"] for row in csv.DictReader(file)] == [str(n) for n in range(300)]
    if page.name == "transcribe.md":
        subtitles = (tmp_path / "recordings" / "monday.mp3.srt").read_text()
        assert "three one four" in subtitles.lower()
    if page.name == "documents.md":
        chat = json.loads((tmp_path / "page.json").read_bytes())
        assert chat["model"] == PADDLE
        picture = base64.b64encode((tmp_path / "page.png").read_bytes()).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        body = {"model": MINERU, "messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
        url = f"http://localhost:{port}/v1/chat/completions"
        assert httpx.post(url, json=body).status_code == 200


@pytest.mark.real
@pytest.mark.parametrize("page", ["first-chat", "retrieval", "transcribe"])
def test_a_guide_runs_with_real_models(page: str, programs: Path, tmp_path: Path) -> None:
    real: dict[str, dict[str, list[tuple[str, Callable[[], str | Path]]]]] = {
        "first-chat": {"--chat-model": [(CHAT, checkpoints.smollm2)]},
        "retrieval": {
            "--embedding-model": [(EMBEDDING, checkpoints.minilm)],
            "--rerank-model": [(RERANKER, reranker)],
        },
        "transcribe": {"--transcription-model": [(WHISPER, checkpoints.whisper)]},
    }
    served = {
        flag: [(name, Path(make())) for name, make in entries]
        for flag, entries in real[page].items()
    }
    command = [*SERVER, *serve_arguments(served), "--port", "0"]
    with started(command) as (_, port):
        wait_until(partial(is_ready, port))
        printed = run_page(ROOT / "docs" / "guides" / f"{page}.md", tmp_path, programs, port)
    if page == "first-chat":
        assert "Tokyo" in printed


# ── checking what is not run ──


def options(command: click.Command) -> set[str]:
    return {name for param in command.params for name in param.opts}


SERVE = options(serve_command())
PARSERS: dict[str, Callable[[list[str]], object]] = {
    "serve": partial(serve_command().make_context, "onequeue serve"),
    "calibrate": partial(calibrate_command().make_context, "onequeue calibrate"),
    "load": partial(parse_args, "onequeue load"),
    "build": lambda arguments: arguments == [] or pytest.fail(f"build {arguments}"),
}


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=f"{b.page}:{n}") for n, b in enumerate(CHECKED)]
)
def test_a_block_that_is_not_run_is_valid(block: Block, port: int) -> None:
    if block.language == "python":
        compile(block.text, block.page, "exec")
    else:
        text = block.text.replace("<this repository>", "x")
        subprocess.run(["bash", "-n", "-c", text], check=True)
        for line in text.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:\.venv/bin/)?onequeue (\w+)(.*)", line):
                check_command(block.page, match[1], shlex.split(match[2]))
        for script in re.findall(r"\./scripts/\w+|docs/deploy/\w+", text):
            assert (ROOT / script).exists(), script
    for route in ROUTE.findall(block.text):
        assert route in routes(port), route


def check_command(page: str, command: str, arguments: list[str]) -> None:
    """Check a command's flags, and that the models which it serves are those of the server."""
    parsed: Any = PARSERS[command](arguments)
    if command == "serve" and page != INSTALL.name:
        names = {name for entries in models().values() for name, _ in entries}
        for flag in ("model", *(flag[2:].replace("-", "_") for flag in models())):
            for entry in split_entries(parsed.params[flag] or CHAT):
                assert split_entry(entry)[1] in names


@cache
def routes(port: int) -> set[str]:
    document = httpx.get(f"http://localhost:{port}/openapi.json").json()
    return {re.sub(r"/\{.*", "", path) or "/" for path in document["paths"]}


def rows(page: Path) -> Iterator[list[str]]:
    for line in page.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("| ").split(" | ")]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_names_of_a_guide_exist(port: int) -> None:
    """Those of settings, flags and routes, in text and in the columns of this server."""
    settings = {name.upper() for name in Settings.__dataclass_fields__} | OTHERS
    texts = {page: FENCE.sub("", page.read_text()) for page in (*GUIDES, INSTALL)}
    names = [
        (page, name) for page, text in texts.items() if page != MIGRATE for name in spans(text)
    ]
    names += [(MIGRATE, name) for row in rows(MIGRATE) for name in spans(row[1])]
    for page, name in names:
        if re.fullmatch(r"--[\w-]+(?: .*)?", name) and page.name != "load-test.md":
            assert name.split()[0] in SERVE | OTHER_FLAGS, (page.name, name)
        elif re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+(=\S+)?", name):
            assert name.split("=")[0] in settings, name
        elif re.fullmatch(r"/[a-z][\w/-]*", name):
            assert name in routes(port), (page.name, name)
    assert len(names) > 150


def test_the_flags_of_transformers_serve_exist() -> None:
    serve = pytest.importorskip("transformers.cli.serve")
    accepted = set(inspect.signature(serve.Serve.__init__).parameters)
    for line in MIGRATE.read_text().partition("## transformers serve")[2].splitlines():
        for flag in re.findall(r"`--([a-z-]+)`", line.split(" | ")[0]):
            assert flag.replace("-", "_") in accepted, flag


def test_the_memory_table_follows_its_formula() -> None:
    sizes = [row for row in rows(INSTALL) if len(row) == 8 and row[3][0].isdigit()]
    assert len(sizes) == 6
    for _, parameters, shape, token_bytes, *gigabytes in sizes:
        layers, heads, head_size = map(int, shape.split(", "))
        billions, per_token = float(parameters.split()[0]), 2 * layers * heads * head_size * 2
        assert int(token_bytes.replace(",", "")) == per_token
        cache = [per_token * tokens / 1e9 for tokens in (8_192, 32_768)]
        computed = [billions * 2, billions * INT4_BYTES, *cache]
        assert gigabytes == [f"{size:.1f} GB" for size in computed]


@pytest.mark.real
def test_calibrate_prints_the_numbers_of_the_memory_table() -> None:
    command = [sys.executable, "-m", "server", "calibrate", checkpoints.smollm2()]
    done = subprocess.run(
        [*command, "--p95-ms", "2000", "--seconds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    page = INSTALL.read_text()
    for name in ("parameters", "token_bytes"):
        [number] = re.findall(rf" {name}=(\d+)", done.stderr)
        assert f"{int(number):,}" in page, done.stderr


def test_a_guide_has_two_screens() -> None:
    for page in GUIDES:
        assert len(page.read_text().splitlines()) <= MAX_LINES, page.name
