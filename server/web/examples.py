"""curl commands for the served models: the response of `GET /` without a browser.

One shell command per endpoint. With API keys, the commands read the key from $API_KEY.
"""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from server.core.settings import Settings
from server.http.json import to_json
from worker.tasks import TASKS

ASSETS = Path(__file__).parent / "assets"
JSON = "content-type: application/json"
FILES = {"image": "picture.jpg", "audio": "recording.wav"}
# Placeholders in examples.json: the model's mask token, and a file in base64.
MASK, FILE = "[MASK]", "$FILE"


def curl_examples(
    settings: Settings, address: str, mask: str = MASK, chats: bool = True
) -> dict[str, str]:
    """Return a command for each endpoint, by what it is about; the pipeline is first.

    `address`: http://host:port without a slash at its end; `mask`: the loaded model's mask
    token; `chats`: the chat model has a chat template, or is not loaded yet."""
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.has_keys else ""
    examples: dict[str, str] = {}
    if settings.pipeline_model != "none":
        body = pipeline_body(settings.pipeline_task, mask)
        examples[settings.pipeline_task] = f"curl {address}/{key} {body}"
    chat: tuple[str, str, str, Any] = ("chat_model", "chat", "/v1/chat/completions", {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 200,  # the model may reason, or have no stop token
    })  # fmt: skip
    completion: tuple[str, str, str, Any] = ("chat_model", "completions", "/v1/completions", {
        "prompt": "The capital of France is", "max_tokens": 20,
    })  # fmt: skip
    endpoints = [
        chat if chats else completion,
        ("embedding_model", "embeddings", "/v1/embeddings", {"input": ["a cat", "a dog"]}),
        ("rerank_model", "reranking", "/rerank", {
            "query": "What is a panda?", "documents": ["A bear of China.", "A city."],
        }),
    ]  # fmt: skip
    for setting, about, path, document in endpoints:
        if getattr(settings, setting) != "none":
            examples[about] = f"curl {address}{path}{key} {json_body(document)}"
    if settings.transcription_model != "none":
        form = f"-F file=@{FILES['audio']}"
        examples["speech"] = f"curl {address}/v1/audio/transcriptions{key} {form}"
    return examples


@cache
def example_inputs() -> dict[str, Any]:
    inputs: dict[str, Any] = json.loads((ASSETS / "examples.json").read_text())
    return inputs


def pipeline_body(name: str, mask: str) -> str:
    """Return curl's arguments for a body that the task takes."""
    task, inputs = TASKS[name], example_inputs()
    if task.kind == "json":
        return json_body({"inputs": inputs["objects"][name]})
    if task.kind in FILES:
        file = FILES[task.kind]
        if task.required:
            document = {"inputs": FILE, "parameters": {"candidate_labels": inputs["labels"]}}
            return json_body(document, file)
        return f"--data-binary @{file}"
    texts = inputs["texts"]
    text = texts.get(name, texts["other"]).replace(MASK, mask)
    if task.required:
        return json_body({"inputs": text, "parameters": {"candidate_labels": inputs["labels"]}})
    return f"-d {shlex.quote(text)}"


def json_body(document: object, file: str = FILES["image"]) -> str:
    """Return curl's arguments for JSON. A file goes in as base64 by standard input, since the
    length of a command line is limited."""
    text = to_json(document).decode()
    if FILE not in text:
        return f"-H {shlex.quote(JSON)} -d {shlex.quote(text)}"
    text = text.replace(FILE, f"$(base64 < {file} | tr -d '\\n')")
    return f"-H {shlex.quote(JSON)} -d @- <<END\n{text}\nEND"
