"""A model by its name on a hub: fetched with the token, served without the hub, or refused."""

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.hub import serving_hub
from tests.process.test_start import ROOT, SERVER, assert_refused, pipe, process, run
from worker.model.loading import LoadingFailed, load_errors

TOKEN = {"HF_TOKEN": "a-token"}
MODEL = "a/model"


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}


def ready(*words: str, **environment: str) -> str:
    """What a start says until it is ready."""
    with process([*SERVER, "--port", "0", *words], **environment) as child:
        said = []
        for line in pipe(child.stderr):
            said.append(line)
            if " ready " in line:
                break
        return "".join(said)


@pytest.mark.slow
def test_a_model_is_fetched_with_the_token_and_then_served_offline(cache: dict[str, str]) -> None:
    with serving_hub(MODEL, ROOT / "worker/demo/fill-mask", TOKEN["HF_TOKEN"]) as made:
        said = ready(MODEL, **cache, **TOKEN, **made.environment)
    assert " ready " in said, said
    assert f"GET /{MODEL}/resolve/main/model.safetensors" in made.requests
    offline = made.environment | cache | {"HF_HUB_OFFLINE": "1"}  # and the hub is gone
    assert " ready " in ready(MODEL, **offline)


@pytest.mark.parametrize(
    ("model", "environment", "says"),
    [
        ("a/missing", TOKEN, "the hub has no such model, or HF_TOKEN has no access to it"),
        ("a/gated", TOKEN, "the model is gated, and HF_TOKEN has no access to it"),
        (MODEL, {"HF_TOKEN": "wrong"}, "the hub does not accept HF_TOKEN"),
        (MODEL, {"HF_HUB_OFFLINE": "1"}, "it is not in the cache, and HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_a_line(
    model: str, environment: dict[str, str], says: str, cache: dict[str, str]
) -> None:
    with serving_hub(MODEL, ROOT / "worker/demo/fill-mask", TOKEN["HF_TOKEN"]) as made:
        done = run([*SERVER, model], **{**made.environment, **cache, **environment})
    assert_refused(done, f"MODEL={model!r}: ", says)
    assert done.stderr.count("\n") == 1


def test_a_model_that_cannot_be_loaded_says_what_the_hub_said() -> None:
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
