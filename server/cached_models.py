"""The models of the local hub cache, which requests may name where MODELS_FROM_CACHE is set.

    scan: complete checkpoints by name → entries → registered → loaded when a request names one

The cache is scanned at the start. It is scanned again, in a thread and at most every few seconds,
when models are listed or a request names an unknown one. Nothing is downloaded: a checkpoint is
loaded from its folder. A cached model joins the endpoints of its kind, if there are any.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from huggingface_hub import constants

from server.apis.openai.models import NamedModel
from server.core.settings import SERVED_NAME, ModelReference, Settings
from server.core.worker_client import WorkerClient
from server.entries import ModelEntry, entry_on_demand
from server.preflight import MODELS, setting_for
from worker.checkpoint_files import GGUF, file_problem, folder_problem
from worker.registry import ServedModel
from worker.task_detection import split_file

log = logging.getLogger("onequeue.cached_models")

MAX_ENTRIES = 10_000  # of the cache's folder that are read
MAX_FILES = 1_000  # of a revision
MAX_REFS = 16  # of a repository
MAX_MODELS = 256
SCAN_INTERVAL_S = 5.0
MAX_WAIT_S = 5.0  # of a request for a scan
COMMIT = re.compile(r"[0-9a-f]{40}")


class CachedModels:
    """`entries`: the configured models. `named`: the same by kind, to which those of the cache are
    added. `make`: returns the registry's entry of a model."""

    def __init__(
        self,
        settings: Settings,
        entries: Sequence[ModelEntry],
        named: Mapping[str, list[NamedModel]],
        worker_client: WorkerClient,
        make: Callable[[ModelEntry], ServedModel],
    ) -> None:
        self._settings, self._entries = settings, entries
        self._named = named
        self._worker_client = worker_client
        self._make = make
        self._room = MAX_MODELS
        self._seen: dict[str, int] = {}
        self._next_at = 0.0  # when the cache may be scanned again
        self._scan: asyncio.Task[bool] | None = None

    def known(self) -> set[str | None]:
        """Return the names that requests may use already."""
        models = chain(*self._named.values())
        return {name for model in models for name in (*model.names, *model.adapters)}

    def find(self, known: Container[str | None]) -> dict[str, tuple[str, Path]]:
        """Return the kind and the path of each other model of the cache. Reads their files."""
        found = scan(Path(constants.HF_HUB_CACHE), known, self._named, self._seen)
        return dict(islice(found, self._room))

    def add(self, found: Mapping[str, tuple[str, Path]]) -> bool:
        """Register the models of a scan. Return whether there are any."""
        for name, (kind, path) in found.items():
            reference = ModelReference(name, name, str(path), is_named=True)
            entry = entry_on_demand(kind, reference, self._settings, self._entries)
            self._worker_client.manager.add(self._make(entry))
            model = NamedModel(reference, self._worker_client, entry.name)
            model.names.add(":".join(filter(None, split_file(name))))
            self._named[kind].append(model)
            log.info("found in the cache serves=%s", entry.name)
        self._room -= len(found)
        return bool(found)

    async def rescan(self) -> bool:
        """Scan the cache, unless it was just scanned. Return whether it has new models."""
        if self._scan is None or self._scan.done():
            if time.monotonic() < self._next_at:
                return False
            self._scan = asyncio.create_task(self._add_new())
        await asyncio.wait({self._scan}, timeout=MAX_WAIT_S)
        return self._scan.done() and self._scan.result()

    async def _add_new(self) -> bool:
        found = await asyncio.to_thread(self.find, self.known())
        self._next_at = time.monotonic() + SCAN_INTERVAL_S
        return self.add(found)


def scan(
    cache: Path, known: Container[str | None], kinds: Container[str], seen: dict[str, int]
) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield the name of each complete checkpoint of these kinds, with its kind and its path.
    `seen`: when those that were read before had changed, in nanoseconds: they are left out."""
    for name, path in _checkpoints(cache):
        if name in known or not SERVED_NAME.fullmatch(name):
            continue
        try:
            if seen.get(name) == (changed := path.stat().st_mtime_ns):
                continue
            seen[name] = changed
            problem = file_problem(path) if path.name.endswith(GGUF) else folder_problem(path)
            kind = "" if problem else MODELS[setting_for(str(path))]
        except Exception as error:  # the files may have any content
            problem, kind = str(error), ""
        if kind in kinds:
            yield name, (kind, path)
        elif problem:
            log.debug("not served from the cache name=%s: %s", name, problem)


def _checkpoints(cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield the folder of each revision in the cache, OWNER/NAME[@REVISION] without `main`, and
    each GGUF file in it."""
    for repository in _entries(cache, MAX_ENTRIES):
        kind, _, id = repository.name.partition("--")
        for ref in _entries(repository / "refs", MAX_REFS) if kind == "models" else ():
            if not COMMIT.fullmatch(commit := _read(ref)):
                continue
            name, at = id.replace("--", "/"), "" if ref.name == "main" else f"@{ref.name}"
            folder = repository / "snapshots" / commit
            yield name + at, folder
            for file in _entries(folder, MAX_FILES):
                if file.name.endswith(GGUF):
                    yield f"{name}/{file.name}{at}", file


def _read(ref: Path) -> str:
    try:
        if ref.is_file():
            with ref.open("rb") as file:
                return file.read(64).decode(errors="replace").strip()
    except OSError:
        pass
    return ""


def _entries(folder: Path, limit: int) -> Sequence[Path]:
    """Return the entries of a folder, in order; none if it cannot be read."""
    try:
        return sorted(islice(folder.iterdir(), limit))
    except OSError:
        return ()
