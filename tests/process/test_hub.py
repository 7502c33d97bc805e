"""Models by their hub id: fetched with the token, served offline, or refused."""

import socket
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from server.preflight import MISUSE
from tests.hub import serving_hub
from tests.matrix import matrix
from tests.process.test_start import assert_refused
from tests.processes import ROOT, SERVER, pipe, process, run
from worker.model.loading import LoadingFailed, load_errors

TOKEN = {"HF_TOKEN": "a-token"}
MODEL = "a/model"


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}


def log_until_ready(*args: str, **environment: str) -> str:
    """Start a server; return its log until it is ready."""
    with process([*SERVER, "--port", "0", *args], **environment) as child:
        lines = []
        for line in pipe(child.stderr):
            lines.append(line)
            if " ready " in line:
                break
        return "".join(lines)


@pytest.mark.slow
def test_a_model_is_fetched_with_the_token_and_then_served_offline(cache: dict[str, str]) -> None:
    with serving_hub(MODEL, ROOT / "worker/demo/fill-mask", TOKEN["HF_TOKEN"]) as hub:
        log = log_until_ready(MODEL, **cache, **TOKEN, **hub.environment)
    assert " ready " in log, log
    assert f"GET /{MODEL}/resolve/main/model.safetensors" in hub.requests
    offline = hub.environment | cache | {"HF_HUB_OFFLINE": "1"}  # the hub has stopped
    assert " ready " in log_until_ready(MODEL, **offline)


@pytest.mark.parametrize(
    ("model", "environment", "message"),
    [
        ("a/missing", TOKEN, "the hub has no such model, or HF_TOKEN has no access to it"),
        ("a/gated", TOKEN, "the model is gated, and HF_TOKEN has no access to it"),
        (MODEL, {"HF_TOKEN": "wrong"}, "the hub does not accept HF_TOKEN"),
        (
            MODEL,
            {"HF_HUB_OFFLINE": "1"},
            "it is not in the cache, and HF_HUB_OFFLINE is set: unset it, or",
        ),
    ],
)
def test_a_model_that_cannot_be_fetched_is_refused_in_one_line(
    model: str, environment: dict[str, str], message: str, cache: dict[str, str]
) -> None:
    with serving_hub(MODEL, ROOT / "worker/demo/fill-mask", TOKEN["HF_TOKEN"]) as hub:
        done = run([*SERVER, model], **{**hub.environment, **cache, **environment})
    assert_refused(done, f"MODEL={model!r}: ", message)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flag", matrix(["--chat-model", "--embedding-model", "--rerank-model"], "--chat-model")
)
def test_a_hub_that_cannot_be_reached_is_asked_once(flag: str, cache: dict[str, str]) -> None:
    """Before torch is imported, for each kind of model."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = run([*SERVER, flag, MODEL], **cache, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    setting = flag[2:].replace("-", "_").upper()
    sentence = (
        f"onequeue: {setting}='{MODEL}': it is not in the cache, and the hub cannot be reached: "
        "check the network, or name a folder"
    )
    assert (done.returncode, done.stderr) == (MISUSE, sentence + "\n")


def test_a_hub_id_is_checked_before_the_app_is_imported(cache: dict[str, str]) -> None:
    python, *server = SERVER
    command = [python, "-X", "importtime", *server, "--chat-model", MODEL]
    done = run(command, **cache | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == MISUSE
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "server.preflight" in imported
    assert imported.isdisjoint({"server.app", "server.http.request", "torch"})


def test_the_error_of_a_load_includes_the_hubs_reason() -> None:
    def load() -> None:
        try:
            raise LocalEntryNotFoundError("offline")
        except LocalEntryNotFoundError as error:
            raise OSError("There was an error when trying to load it:\n") from error

    with (
        pytest.raises(LoadingFailed, match="'a/b' could not be loaded for chat: it is not in the"),
        load_errors("a/b", "chat"),
    ):
        load()
