#!/usr/bin/env python3
"""Fill the generated tables in docs/: settings.md from the settings, metrics.md from the metrics,
fields.md from the structs of requests.

    generate_docs.py --check          write nothing; a table that is out of date is an error
    generate_docs.py models           fill the table in architectures.md, in some minutes
    generate_docs.py models TYPE …    print that table for some model types
    generate_docs.py reference FOLDER make a folder of the page at GET /docs and its document

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. The rest of a page is
written by hand. For the table of models a tiny random-weight model of each type is loaded as the
server does, and its greedy output compared with that of `generate` (tests/causal_parity.py).
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from environment import ROOT
from prometheus_client import ProcessCollector

from server.apis.openai.audio.request import TranscriptionRequest, TranslationRequest
from server.apis.openai.audio.speech import SpeechRequest
from server.apis.openai.embedding.rerank import RerankRequest
from server.apis.openai.request_fields import GenerationRequest, known_fields
from server.app import create_app
from server.commands.serve import default_text
from server.core.metrics import Metrics
from server.core.settings import Settings, load_settings
from server.http.operation import OperationRoute
from server.openapi.document import build_document
from server.web.examples import ASSETS


def settings_table() -> str:
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for spec in fields(Settings):
        choices = ", ".join(spec.metadata["choices"])
        text = spec.metadata["help"] + (f": {choices}" if choices else "")
        rows.append(f"| `{spec.name.upper()}` | `{default_text(spec.default)}` | {text} |")
    return "\n".join(rows)


def metrics_table() -> str:
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    metrics = Metrics(lambda: 0.0)
    instruments: dict[Any, None] = dict.fromkeys(metrics.registry._names_to_collectors.values())
    for instrument in instruments:
        if instrument is metrics or isinstance(instrument, ProcessCollector):
            continue
        name, kind = instrument._name, instrument._type
        suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
        labels = ", ".join(f"`{label}`" for label in instrument._labelnames) or "–"
        rows.append(f"| `{name}{suffix}` | {kind} | {labels} | {instrument._documentation} |")
    return "\n".join(rows)


def fields_table() -> str:
    """Return a table of the routes that generate text, and a list of fields for each other one."""
    kinds = request_kinds()
    columns = {path: kinds.pop(path) for path in GENERATION_PATHS}
    names = dict.fromkeys(chain.from_iterable(map(field_names, columns.values())))
    header = " | ".join(f"`{path}`" for path in columns)
    rows = [f"| field | {header} |", "| --- |" + " --- |" * len(columns)]
    for name in sorted(names):
        cells = " | ".join(field_effect(name, kind) for kind in columns.values())
        rows.append(f"| `{name}` | {cells} |")
    rows += ["", "Other routes:", ""]
    for path, kind in kinds.items():
        if issubclass(kind, GenerationRequest):
            continue  # it counts the tokens of a route above
        fields = [f"`{name}` ({field_effect(name, kind)})" for name in sorted(field_names(kind))]
        rows.append(f"- `{path}`: {', '.join(fields).replace(' (yes)', '')}.")
    return "\n".join(rows)


def field_names(kind: Any) -> set[str]:
    """Return the names and paths of fields that a kind of request knows."""
    return {*known_fields(kind), *getattr(kind, "unimplemented", ())}


def field_effect(name: str, kind: Any) -> str:
    if name in getattr(kind, "unimplemented", {}):
        values = dict.fromkeys(map(str, map(to_text, kind.unimplemented[name])))
        return f"400 unless {' or '.join(values)}" if values else "400"
    if name in getattr(kind, "without_effect", ()):
        return "no effect"
    return "yes" if name in known_fields(kind) else "–"


def to_text(value: Any) -> str:
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def request_kinds() -> dict[str, type[msgspec.Struct]]:
    """Return the structs of requests, by the paths of their routes."""
    paths: dict[type[msgspec.Struct], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(load_settings({"BATCH_DIR": folder}))
    for route in app.routes:
        if isinstance(route, OperationRoute) and isinstance(route.operation.request, type):
            paths.setdefault(route.operation.request, []).append(route.path)
    kinds = {path: kind for kind, of_kind in paths.items() for path in of_kind}
    return kinds | {  # no demo model reranks or speaks; forms have no struct in the routes
        "/v1/rerank": RerankRequest,
        "/v1/audio/speech": SpeechRequest,
        "/v1/audio/transcriptions": TranscriptionRequest,
        "/v1/audio/translations": TranslationRequest,
    }


def write_reference(folder: Path) -> None:
    """Write the page at GET /docs into a folder that a static server can serve, with the document
    of a server that serves models of all kinds."""
    with tempfile.TemporaryDirectory() as batches:
        models = dict.fromkeys(MODEL_SETTINGS, "demo") | {"RERANK_MODEL": "reranker=owner/name"}
        app = create_app(load_settings({**models, "BATCH_DIR": batches}))
    routes = [route for route in app.routes if isinstance(route, OperationRoute)]
    shutil.copytree(ASSETS, folder / "assets", dirs_exist_ok=True)
    shutil.copy(ASSETS / "reference.html", folder / "index.html")
    (folder / "openapi.json").write_text(json.dumps(build_document(True, routes)))


def models_table() -> str:
    """Return a line for each mode and reason, with the model types of which it is true."""
    from tests.causal_families import families
    from tests.causal_parity import NotBuilt, check_family

    groups: dict[tuple[str, str], list[str]] = {}
    for kind in sys.argv[2:] or families():
        with tempfile.TemporaryDirectory() as folder:
            try:
                mode, why = check_family(kind, Path(folder) / kind)
            except NotBuilt as error:
                mode, why = "not built", str(error).split(". ")[0].rstrip(":")
        why = re.sub(r"[\d.]+e[+-]\d+", "x", why).split(";")[0]
        groups.setdefault((mode, why), []).append(f"`{kind}`")
    rows = ["| runs | reason | model types |", "| --- | --- | --- |"]
    for of_mode, name in MODES.items():
        for mode, why in sorted(groups):
            if mode == of_mode:
                rows.append(f"| {name} | {why or '–'} | {', '.join(sorted(groups[mode, why]))} |")
    return "\n".join(rows)


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "settings": (ROOT / "docs" / "settings.md", settings_table),
    "metrics": (ROOT / "docs" / "metrics.md", metrics_table),
    "fields": (ROOT / "docs" / "fields.md", fields_table),
    "models": (ROOT / "docs" / "architectures.md", models_table),
}
GENERATION_PATHS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
MODEL_SETTINGS = "PIPELINE_MODEL", "CHAT_MODEL", "EMBEDDING_MODEL", "TRANSCRIPTION_MODEL"
MODES = {
    "paged": "paged",
    "own cache": "transformers' cache",
    "refused": "refused",
    "not built": "not built tiny",
}


def filled(name: str) -> str:
    """Return the page with its table replaced."""
    page, table = TABLES[name]
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{table()}\n{end}", page.read_text())


def main() -> None:
    if sys.argv[1:2] == ["reference"]:
        return write_reference(Path(sys.argv[2]))
    if sys.argv[1:2] == ["models"] and sys.argv[2:]:
        return print(models_table())
    for name in ["models"] if sys.argv[1:] == ["models"] else ["settings", "metrics", "fields"]:
        page, text = TABLES[name][0], filled(name)
        if text != page.read_text():
            if "--check" in sys.argv:
                raise SystemExit(f"{page.name} is out of date: run scripts/generate_docs.py")
            page.write_text(text)


if __name__ == "__main__":
    main()
