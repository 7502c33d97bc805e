"""Startup errors: one sentence, before a model is loaded, and an exit status.

The status is 2 for errors that `onequeue serve` detects; 3, uvicorn's, for a failed start and for
uvicorn's own command.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from server.__main__ import main
from server.app import create_app
from server.core.settings import Settings, SettingsError, load_settings
from server.preflight import MISUSE, STARTUP_FAILURE
from tests.checkpoints import write_checkpoint
from tests.processes import ROOT, SERVER, pipe, program, run, started
from tests.serving import read_response, wait_until

UVICORN = [sys.executable, "-m", "uvicorn", "server.app:app"]
LONG = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n"
WAITS = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"

PROGRAM = """
    import sys, uvicorn
    from batching.errors import ItemFailed
    from server.app import create_app
    from server.core.settings import Settings

    def fails():
        sys.stdin.readline()
        try:
            raise ValueError("the weights are missing")
        except ValueError as error:
            raise {error} from error

    settings = Settings(chat_model="none", embedding_model="none", debug={debug})
    uvicorn.run(create_app(settings, fails), port=0, timeout_graceful_shutdown=5)
"""

LATER = """
    import uvicorn
    from server.app import create_app
    from server.core.settings import Settings
    from tests.fakes import FakeRunner

    def device_lost(texts):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    settings = Settings(chat_model="none", embedding_model="none")
    app = create_app(settings, lambda: FakeRunner(device_lost))
    uvicorn.run(app, port=0)
"""


def assert_refused(
    done: subprocess.CompletedProcess[str], *parts: str, status: int = MISUSE
) -> None:
    assert done.returncode == status
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("onequeue: ")]
    assert all(part in sentence for part in parts)
    assert "Traceback" not in done.stderr


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """Return scripts/serve of a checkout where everything is installed."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "serve", tmp_path / "scripts")
    (tmp_path / "scripts" / "install").write_text("#!/bin/sh\n")
    (tmp_path / "scripts" / "install").chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for package in ("server", "batching", "worker"):
        (tmp_path / package).symlink_to(ROOT / package)
    return [str(tmp_path / "scripts" / "serve")]


NOTHING = dict.fromkeys(("pipeline_model", "chat_model", "embedding_model"), "none")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_model": "/nowhere"}, "PIPELINE_MODEL='/nowhere': there is no such folder"),
        ({"chat_model": "~/nowhere"}, "CHAT_MODEL='~/nowhere': there is no such folder"),
        ({"chat_model": "tests"}, "there is no config.json"),
        ({"chat_model": "a/b/c"}, "neither a folder nor a hub id"),
        ({"chat_model": "a b"}, "neither a folder nor a hub id"),
        ({"pipeline_task": "text-classification"}, "PIPELINE_MODEL=demo serves fill-mask only"),
        ({"pipeline_task": "summarization"}, "transformers 5 has dropped the task 'summarization'"),
        ({"pipeline_task": "fill-mast"}, "PIPELINE_TASK: unknown task 'fill-mast'"),
        ({"device": "gpu"}, "DEVICE='gpu': must be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:"}, "DEVICE='cuda:'"),
        ({"device": "cuda", "quantization": "int8"}, "QUANTIZATION=int8 and DEVICE=cuda"),
        ({"device": "cuda", "quantization": "int4"}, "int4 is for models on a CPU"),
        (NOTHING, "there is nothing to serve"),
        ({"embedding_model": "/nowhere"}, "EMBEDDING_MODEL='/nowhere': there is no such folder"),
        ({"rerank_model": "demo"}, "RERANK_MODEL=demo: there is no demo reranker"),
        ({"responses_db": "/nowhere/responses.db"}, "RESPONSES_DB='/nowhere/responses.db'"),
    ],
)
def test_invalid_settings_are_refused_before_a_model_is_loaded(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        create_app(Settings(**settings))  # type: ignore[arg-type]  # these are strings
    assert message in str(refused.value)


def test_a_file_that_is_no_database_keeps_its_mode(tmp_path: Path) -> None:
    (file := tmp_path / "notes").write_text("These are no rows. " * 9)
    file.chmod(0o644)
    with pytest.raises(SettingsError, match="file is not a database"):
        create_app(Settings(responses_db=str(file)))
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["KV_CACHE_DIR", "BATCH_DIR", "RESPONSES_DB"])
@pytest.mark.parametrize("value", ["auto", "None", "null"])
def test_words_for_nothing_are_no_paths(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}='{value}': must be a f"):
        load_settings({name: value})


def test_every_start_command_refuses_in_one_sentence(script: list[str]) -> None:
    for command, status in ((UVICORN, STARTUP_FAILURE), (SERVER, MISUSE), (script, MISUSE)):
        done = run(command, PIPELINE_MODEL="/nowhere")
        assert_refused(done, "PIPELINE_MODEL='/nowhere'", status=status)


def test_tls_files_that_do_not_match_are_refused(tmp_path: Path) -> None:
    (file := tmp_path / "empty.pem").touch()
    assert_refused(run([*SERVER, "--ssl-certfile", str(file)]), f"--ssl-certfile {file}")


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        (["--host", "no host"], {}, "--host no host"),
        (["--host", "192.0.2.1"], {}, "Cannot assign requested address"),  # is for documentation
        (["--port", "70000"], {}, "--port 70000: must be 0 to 65535"),
        (["--uds", "/nowhere/socket"], {}, "--uds /nowhere/socket: its folder does not exist"),
        (["--ssl-keyfile", "/nowhere"], {}, "--ssl-keyfile /nowhere: needs --ssl-certfile"),
        (["--ssl-certfile", "/nowhere"], {}, "--ssl-certfile /nowhere: does not exist"),
        ([], {"PORT": "many"}, "'PORT'): 'many' is not a valid integer"),
        ([], {"PORT": "70000"}, "PORT=70000: must be 0 to 65535"),
        ([], {"HOST": "no host"}, "HOST=no host: "),
        (["--port", "80000"], {"PORT": "70000"}, "--port 80000: must be"),
        ([], {"PORT": "70000", "UVICORN_PORT": "80000"}, "--port 80000: must be"),
        (["--host", "other host"], {"HOST": "no host"}, "--host other host: "),
        (["/nowhere"], {}, "MODEL='/nowhere': there is no such folder"),
        (["a b"], {}, "MODEL='a b': is neither a folder nor a hub id"),
        (["demo", "again"], {}, "unexpected extra argument (again)"),
        (["--max-batch-sise", "8"], {}, "--max-batch-size"),
        (["--port", "many"], {}, "'many' is not a valid integer"),
        ([str(ROOT / "worker/demo/chat"), "--chat-model", "demo"], {}, "give one of them"),
        (["--max-batch-size", "none"], {"MAX_BATCH_SIZE": "8"}, "MAX_BATCH_SIZE='none': must be a"),
        (["--workers", "2"], {}, "one process serves the model"),
        ([], {"WEB_CONCURRENCY": "2"}, "WEB_CONCURRENCY=2: one process serves the model"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line_before_the_model_loads(
    args: list[str], env: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *args, **env)


def refusal(capsys: pytest.CaptureFixture[str], *args: str, **env: str) -> str:
    """Return the line of a command that ends before it loads the model, which does not exist."""
    with (
        patch.dict(os.environ, {"PIPELINE_MODEL": "/nowhere", **env}),
        pytest.raises(SystemExit) as ended,
    ):
        main(["serve", *args])
    assert ended.value.code == MISUSE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("onequeue: ")
    return line


def test_an_env_file_is_read_before_the_settings_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment and flags override it."""
    file = tmp_path / "settings"
    file.write_text("CHAT_MODEL=/elsewhere\nDTYPE=none\nMAX_BATCH_SIZE=none\n")
    flags = ["--env-file", str(file), "--max-batch-size", "8"]
    line = refusal(capsys, *flags, PIPELINE_MODEL="none", DTYPE="float32")
    assert "CHAT_MODEL='/elsewhere'" in line


def test_a_port_in_use_is_refused_before_the_model_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for line, part in (
            (refusal(capsys, "--port", port), f"--port {port}"),
            (refusal(capsys, PORT=port), f"--host 127.0.0.1 PORT={port}"),
        ):
            assert part in line
            assert "Address already in use" in line


def test_the_command_needs_no_torch() -> None:
    code = "import sys, server.__main__ as command; command.main(['serve', '--help'])"
    done = run([sys.executable, "-c", code + "; print(*sys.modules)"])
    assert done.returncode == 0
    assert not {"torch", "transformers"} & set(done.stdout.splitlines()[-1].split())


def test_ctrl_c_during_the_imports_prints_nothing() -> None:
    code = """
        import builtins, os, runpy, signal
        # the tests' environment may ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        find = builtins.__import__

        def interrupted(name, *where, **parts):
            if name == "click":
                os.kill(os.getpid(), signal.SIGINT)
            return find(name, *where, **parts)

        builtins.__import__ = interrupted
        runpy.run_module("server", run_name="__main__")
    """
    done = run([*program(code), "serve"])
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_reloading_server_leaves_omp_num_threads_unset() -> None:
    code = """
        import os, server.__main__ as command, server.commands.serve as serve
        serve.uvicorn_command.callback = lambda **flags: print(os.environ["OMP_NUM_THREADS"])
        command.main(["serve", "--port", "0", "--reload"])
    """
    done = run(program(code), OMP_NUM_THREADS="")
    assert done.stdout == "\n", done.stderr


@pytest.mark.parametrize(
    ("flags", "env"), [(["--workers=2"], {}), ([], {"WEB_CONCURRENCY": "2"})], ids=str
)
def test_uvicorns_worker_processes_print_the_refusal_once(
    flags: list[str], env: dict[str, str]
) -> None:
    done = run([*UVICORN, "--port", "0", *flags], **env)
    assert done.stderr.count("one process serves the model") == 1
    assert done.returncode


def test_every_start_command_limits_headers(script: list[str]) -> None:
    for command in (UVICORN, SERVER, script):
        with (
            started([*command, "--port", "0"], CHAT_MODEL="none") as (_, port),
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            client.sendall(LONG)
            assert read_response(client)[0] == 431


def test_a_server_whose_model_fails_to_load_answers_waiting_requests_and_exits() -> None:
    command = program(PROGRAM, debug=False, error='ItemFailed("the model has failed")')
    with started(command) as (child, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(WAITS)
            assert client.recv(100).startswith(b"HTTP/1.1 100 ")
            pipe(child.stdin).write("\n")
            pipe(child.stdin).flush()
            error = next(line for line in pipe(child.stderr) if line.startswith("onequeue: "))
            client.sendall(b"text")
            status, body = read_response(client)
            assert (status, b"worker_down" in body) == (503, True)
        assert child.wait(20) == 3
        assert error == "onequeue: the model has failed: the weights are missing\n"
        assert "Traceback" not in pipe(child.stderr).read()


def test_debug_shows_the_traceback_of_a_failed_load() -> None:
    with started(program(PROGRAM, debug=True, error="KeyError")) as (child, _):
        _, stderr = child.communicate("\n", timeout=20)
        assert child.returncode == 3
        assert "onequeue: the models could not be loaded: KeyError()" in stderr
        assert "ValueError: the weights are missing" in stderr


def test_a_checkpoint_that_cannot_be_loaded_stops_the_server(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model_type": "bert"})
    model = {"PIPELINE_MODEL": str(tmp_path), "PIPELINE_TASK": "fill-mask", "CHAT_MODEL": "none"}
    done = run([*SERVER, "--port", "0"], **model)
    assert_refused(done, str(tmp_path), "could not be loaded", status=STARTUP_FAILURE)


def test_a_server_whose_worker_dies_later_keeps_reporting_it() -> None:
    with started(program(LATER)) as (child, port):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
        assert httpx.post(url, content="a").status_code == 503
        assert httpx.get(url + "/health").json()["error"]["code"] == "worker_down"
        assert child.poll() is None
