"""curl lines that work for what is served: for `GET /` without a browser.

One line of the shell a way in; where API keys are set the key comes from $API_KEY.
"""

import json
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from server.core.settings import Settings
from server.http.json import to_json
from worker.tasks import TASKS

ASSETS = Path(__file__).parent / "assets"
JSON = "content-type: application/json"
FILES = {"image": "picture.jpg", "audio": "recording.wav"}
MASK, FILE = "[MASK]", "$FILE"  # in an example: the model's own token; a file in base64


@dataclass(frozen=True, slots=True)
class CurlExample:
    about: str
    command: str


def curl_examples(settings: Settings, address: str, mask: str = MASK) -> list[CurlExample]:
    """For each thing that is served at `address` (http://host:port, no slash at its end), the
    pipeline first. `mask`: the loaded model's own, for fill-mask."""
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_keys else ""
    lines: list[CurlExample] = []
    if settings.pipeline_model != "none":
        command = f"curl {address}/{key} {pipeline_body(settings.pipeline_task, mask)}"
        lines.append(CurlExample(settings.pipeline_task, command))
    ways = [
        ("chat_model", "chat", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 200,  # a model may think, or not know an end
        }),
        ("embedding_model", "embeddings", "/v1/embeddings", {"input": ["a cat", "a dog"]}),
        ("rerank_model", "reranking", "/rerank", {
            "query": "What is a panda?", "documents": ["A bear of China.", "A city."],
        }),
    ]  # fmt: skip
    for setting, about, path, document in ways:
        if getattr(settings, setting) != "none":
            lines.append(CurlExample(about, f"curl {address}{path}{key} {json_body(document)}"))
    if settings.transcription_model != "none":
        form = f"-F file=@{FILES['audio']}"
        lines.append(CurlExample("speech", f"curl {address}/v1/audio/transcriptions{key} {form}"))
    return lines


@cache
def examples() -> dict[str, Any]:
    """Of inputs, by task: the page's own."""
    document: dict[str, Any] = json.loads((ASSETS / "examples.json").read_text())
    return document


def pipeline_body(name: str, mask: str) -> str:
    """curl's words for a body that the task takes."""
    task = TASKS[name]
    if task.kind == "json":
        return json_body({"inputs": examples()["objects"][name]})
    if task.kind in FILES:
        file = FILES[task.kind]
        if task.required:
            document = {"inputs": FILE, "parameters": {"candidate_labels": examples()["labels"]}}
            return json_body(document, file)
        return f"--data-binary @{file}"
    texts = examples()["texts"]
    text = texts.get(name, texts["other"]).replace(MASK, mask)
    if task.required:
        return json_body({"inputs": text, "parameters": {"candidate_labels": examples()["labels"]}})
    return f"-d {shlex.quote(text)}"


def json_body(document: object, file: str = FILES["image"]) -> str:
    """Files go in by base64, from standard input: a command's words have a limit."""
    text = to_json(document).decode()
    if FILE not in text:
        return f"-H {shlex.quote(JSON)} -d {shlex.quote(text)}"
    text = text.replace(FILE, f"$(base64 < {file} | tr -d '\\n')")
    return f"-H {shlex.quote(JSON)} -d @- <<END\n{text}\nEND"
