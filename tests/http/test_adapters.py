"""LoRA adapters by name: routes, listing and life cycle, with a fake model."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.apis.openai.adapters import MAX_ADAPTERS
from server.core.settings import SettingsError, load_settings
from tests import tiny_adapters
from tests.event_streams import assert_refused, chat, error_of, open_stream, post
from tests.fake_generator import FakeGenerator
from tests.serving import Server, serving, wait_until
from worker.load_context import advance
from worker.messages.adapters import Adapter

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def write(folder: Path) -> Path:
    return tiny_adapters.write(folder, tiny_adapters.tensors_for({"layer": (2, 2)}, 1))


@dataclass
class Setup:
    server: Server
    generator: FakeGenerator

    def listed(self) -> dict[str, Any]:
        models = httpx.get(self.server.url + "/v1/models").json()["data"]
        return {model["id"]: model for model in models}

    def ask(self, model: str, text: str = "say yes", **more: Any) -> httpx.Response:
        return chat(self.server, text, model=model, **more)

    def load(self, name: str, path: object, **more: Any) -> httpx.Response:
        return post(self.server, LOAD, {"lora_name": name, "lora_path": str(path), **more})

    def unload(self, name: str) -> httpx.Response:
        return post(self.server, UNLOAD, {"lora_name": name})

    def adapter_of(self, number: int) -> str | None:
        adapter = self.generator.payloads[number].adapter
        return adapter.name if adapter else None


@contextmanager
def adapters(
    folder: Path, generator: FakeGenerator | None = None, **settings: Any
) -> Iterator[Setup]:
    generator = generator or FakeGenerator()
    settings = {"lora_dir": str(folder), "model_control": True, **settings}
    with serving(load_chat=lambda: generator, **settings) as server:
        try:
            yield Setup(server, generator)
        finally:
            generator.release()


def test_configured_adapters_are_chosen_by_name_at_each_endpoint(tmp_path: Path) -> None:
    write(tmp_path / "one")
    with adapters(tmp_path, chat_model="base=demo", lora=("tuned=one",)) as setup:
        listed = setup.listed()
        assert listed["tuned"]["parent"] == "base"
        assert listed["tuned"]["status"]["value"] == "loaded"
        assert "parent" not in listed["base"]
        assert setup.ask("tuned").json()["model"] == "tuned"
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "say yes"},
            "/v1/responses": {"input": "say yes"},
            "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
        }
        for path, body in bodies.items():
            answer = post(setup.server, path, {"model": "tuned", **body})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "tuned"
        assert [setup.adapter_of(n) for n in range(4)] == ["tuned"] * 4
        assert setup.ask("base").status_code == 200
        assert setup.adapter_of(4) is None
        assert httpx.get(setup.server.url + "/v1/models/tuned").json()["parent"] == "base"
        assert "'base', 'tuned'" in error_of(setup.ask("other"))["message"]


def test_adapters_are_loaded_replaced_and_unloaded(tmp_path: Path) -> None:
    write(tmp_path / "one")
    with adapters(tmp_path) as setup:
        assert setup.ask("a").status_code == 404
        answer = setup.load("a", "one")
        assert answer.status_code == 200, answer.text
        assert setup.load("b", tmp_path / "one").status_code == 200
        assert setup.ask("a").status_code == setup.ask("b").status_code == 200
        first = setup.generator.payloads[0].adapter
        assert error_of(setup.load("a", "one"))["param"] == "lora_name"
        assert setup.load("a", "one", load_inplace=True).status_code == 200
        assert setup.ask("a").status_code == 200
        again = setup.generator.payloads[-1].adapter
        assert first
        assert again
        assert first.number != again.number
        assert setup.unload("a").status_code == 200
        assert error_of(setup.ask("a"))["code"] == "model_not_found"
        assert setup.unload("a").status_code == 404
        assert set(setup.listed()) == {"demo", "b"}


def test_requests_finish_with_the_adapter_that_was_unloaded(tmp_path: Path) -> None:
    write(tmp_path / "one")
    with adapters(tmp_path, lora=("a=one",)) as setup, ThreadPoolExecutor(1) as pool:
        setup.generator.one_by_one = True
        running = pool.submit(setup.ask, "a", "say 1 2 3")
        wait_until(lambda: bool(setup.generator.running))
        adapter = setup.generator.payloads[0].adapter
        assert adapter
        assert setup.unload("a").status_code == 200
        assert setup.ask("a").status_code == 404
        assert adapter.weights
        setup.generator.release()
        answer = running.result(60)
        assert answer.json()["choices"][0]["message"]["content"] == "1 2 3"
        wait_until(lambda: adapter.weights is None)


def test_the_gauge_names_running_and_waiting_adapters(tmp_path: Path) -> None:
    write(tmp_path / "one")
    with adapters(tmp_path, lora=("a=one", "b=one")) as setup, ThreadPoolExecutor(2) as pool:

        def labels() -> str:
            text = httpx.get(setup.server.url + "/metrics").text
            lines = text.splitlines()
            [line] = [one for one in lines if one.startswith("vllm:lora_requests_info{")]
            return line[line.index("{") : line.index("}") + 1]

        rest = f'max_lora="{MAX_ADAPTERS}",running_lora_adapters="%s",waiting_lora_adapters="%s"'
        assert labels() == "{" + rest % ("", "") + "}"
        setup.generator.gate.clear()
        asked = [pool.submit(setup.ask, name) for name in "ab"]
        wait_until(lambda: labels() == "{" + rest % ("", "a,b") + "}")
        setup.generator.release()
        assert [one.result(60).status_code for one in asked] == [200, 200]


def test_adapters_are_loaded_again_with_their_base(tmp_path: Path) -> None:
    write(tmp_path / "one")
    models, lora = "main=demo,base=demo", ("a=one;base=base",)
    with adapters(tmp_path, chat_model=models, lora=lora) as setup:
        assert setup.listed()["a"]["status"]["value"] == "unloaded"
        assert setup.ask("a").status_code == 200  # loads the base
        adapter = setup.generator.payloads[0].adapter
        assert adapter
        assert adapter.weights
        assert setup.listed()["a"]["status"]["value"] == "loaded"
        assert post(setup.server, "/models/unload", {"model": "base"}).status_code == 200
        wait_until(lambda: adapter.weights is None)
        assert setup.listed()["a"]["status"]["value"] == "unloaded"
        assert setup.ask("a").status_code == 200
        assert adapter.weights
        (tmp_path / "one" / "adapter_config.json").unlink()
        assert post(setup.server, "/models/unload", {"model": "base"}).status_code == 200
        wait_until(lambda: setup.listed()["a"]["status"]["value"] == "unloaded")
        failed = setup.ask("a")
        assert failed.status_code == 503
        assert "'a' could not be loaded: there is no adapter_config" in error_of(failed)["message"]
        assert setup.ask("base").status_code == 200  # alone without the adapter


def test_paths_lie_inside_the_folder_of_adapters(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", write(tmp_path / "outside")
    write(inside / "one")
    (inside / "link").symlink_to(outside)
    (inside / "linked").mkdir()
    for file in outside.iterdir():
        (inside / "linked" / file.name).symlink_to(file)
    write(inside / "pickled")
    (inside / "pickled" / "adapter_model.safetensors").rename(inside / "pickled" / "x.bin")
    bad = ["../outside", outside, "link", "linked", "pickled", "none", "", "a\0b", "one/../..", "/"]
    with adapters(inside) as setup:
        for path in bad:
            error = error_of(setup.load("a", path))
            assert error["param"] == "lora_path", error
        assert len(setup.listed()) == 1
        assert setup.load("a", "./one/../one").status_code == 200
    for settings in ({"lora": ("a=link",)}, {"lora": ("a=one",), "lora_dir": "none"}):
        with pytest.raises(SettingsError, match="LORA_DIR"), adapters(inside, **settings):
            pass


def test_requests_that_cannot_be_served_name_the_field(tmp_path: Path) -> None:
    write(tmp_path / "one")
    more: dict[str, Any] = {"lora": ("loaded=one",), "model_aliases": ("taken=demo",)}
    with adapters(tmp_path, chat_model="demo", **more) as setup:
        for name in ("demo", "taken", "a b", "", 1):
            assert_refused(
                post(setup.server, LOAD, {"lora_name": name, "lora_path": "one"}), "lora_name"
            )
        assert_refused(setup.load("a", "one", base_model_name="loaded"), "base_model_name")
        assert_refused(setup.load("a", "x" * 5000), "lora_path")
        unknown = setup.load("a", "one", base_model_name="none")
        assert (unknown.status_code, error_of(unknown)["param"]) == (404, "model")


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": ("demo=one",)},
        {"lora": ("a=one", "a=one")},
        {"lora": ("a=one;base=other",)},
        {"lora": ("a=missing",)},
        {"lora_dir": "/nowhere"},
    ],
)
def test_settings_that_cannot_be_served_are_refused(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    write(tmp_path / "one")
    with pytest.raises(SettingsError, match="LORA"), adapters(tmp_path, **settings):
        pass


def test_a_file_of_models_names_adapters(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('chat_model = "demo"\n[[lora]]\nname = "a"\npath = "one"\nbase = "demo"\n')
    assert load_settings({"MODELS": str(file)}).lora == ("a=one;base=demo",)
    for wrong in ('lora = ["a"]', "[[lora]]\nname = 'a'"):
        file.write_text(wrong)
        with pytest.raises(SettingsError):
            load_settings({"MODELS": str(file)})


class SlowAdapters(FakeGenerator):
    """Reads adapters when its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Semaphore(0)
        self.may_read = threading.Event()

    def load_adapter(self, adapter: Adapter) -> None:
        self.reads.release()
        assert self.may_read.wait(60)
        advance()
        super().load_adapter(adapter)

    def release(self) -> None:
        self.may_read.set()
        super().release()


def test_a_late_load_and_a_client_that_leaves_free_the_name_of_their_adapter(
    tmp_path: Path,
) -> None:
    write(tmp_path / "one")
    generator, body = SlowAdapters(), {"lora_name": "a", "lora_path": "one"}
    with adapters(tmp_path, generator) as setup:

        def post_late() -> httpx.Response:
            return post(setup.server, LOAD, body, **{"X-Request-Timeout-Ms": "100"})

        late = post_late()
        message = "the adapter 'a' was not loaded within the request's time limit"
        assert (late.status_code, error_of(late)["message"]) == (504, message)
        assert generator.reads.acquire(timeout=60)
        with open_stream(setup.server, LOAD, body):
            assert generator.reads.acquire(timeout=60)  # by another thread
            assert "'a' is being loaded" in setup.load("a", "one").text
        wait_until(lambda: post_late().status_code == 504)
        generator.may_read.set()
        assert setup.load("a", "one").status_code == 200
        assert setup.ask("a").status_code == 200
