"""The models of the local hub cache, which requests may name with MODELS_FROM_CACHE=1.

The cache is scanned at the start, and in a thread when models are listed or a request names an
unknown one, at most every few seconds. A complete checkpoint joins the endpoints of its kind. It is
loaded from its folder when a request names it: nothing is downloaded.
"""

import asyncio
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from server.apis.openai.models import ModelGroup, NamedModel
from server.core.settings import SERVED_NAME, ModelReference, Settings
from server.core.worker_client import WorkerClient
from server.entries import ModelEntry, entry_on_demand
from server.preflight import MODELS, setting_for
from worker.checkpoint_files import GGUF, file_problem, folder_problem
from worker.registry import ServedModel
from worker.task_detection import split_file

COMMIT_CHARS = 40
SCAN_INTERVAL_S = 5.0
MAX_WAIT_S = 5.0  # of a request for a scan
Checkpoints = dict[str, tuple[str, Path]]  # kinds and paths, by name


@dataclass(eq=False)
class CachedModels:
    """`entries`: the configured models. `named`: the same by kind, to which those of the cache are
    added. `make`: returns the registry's entries of models."""

    settings: Settings
    entries: Sequence[ModelEntry]
    named: Mapping[str, list[NamedModel]]
    worker_client: WorkerClient
    make: Callable[[Sequence[ModelEntry]], Sequence[ServedModel]]

    def __post_init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._next_at = 0.0  # when the cache may be scanned again
        self._scan: asyncio.Task[None] | None = None

    def find(self) -> Checkpoints:
        """Return models of the cache that were not found before. Reads their files."""
        return dict(scan(Path(constants.HF_HUB_CACHE), self.named, self._seen))

    def add(self, found: Checkpoints) -> None:
        models = ModelGroup(*self.named.values()).models
        known = {name for model in models for name in (*model.names, *model.adapters)}
        new = {name: found[name] for name in found if name not in known}
        for name, (kind, path) in new.items():
            reference = ModelReference(name, name, str(path), is_named=True)
            entry = entry_on_demand(kind, reference, self.settings, self.entries)
            self.worker_client.manager.add(*self.make([entry]))
            model = NamedModel(reference, self.worker_client, entry.name)
            model.names.add(":".join(filter(None, split_file(name))))
            self.named[kind].append(model)

    async def rescan(self) -> None:
        """Scan the cache and register new models, unless it was scanned a moment ago."""
        if self._scan is None or self._scan.done():
            if time.monotonic() < self._next_at:
                return
            self._scan = asyncio.create_task(self._add_new())
        await asyncio.wait({self._scan}, timeout=MAX_WAIT_S)

    async def _add_new(self) -> None:
        found = await asyncio.to_thread(self.find)
        self._next_at = time.monotonic() + SCAN_INTERVAL_S
        self.add(found)


def scan(
    cache: Path, kinds: Container[str], seen: dict[str, int]
) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield the name of each complete checkpoint of these kinds, with its kind and its path.
    `seen`: when those that were read before had changed, in nanoseconds: they are left out."""
    for name, path in _checkpoints(cache):
        with suppress(Exception):  # the files may have any content
            changed = path.stat().st_mtime_ns
            if seen.get(name) == changed or not SERVED_NAME.fullmatch(name):
                continue
            seen[name] = changed
            problem = file_problem(path) if path.name.endswith(GGUF) else folder_problem(path)
            if not problem and (kind := MODELS[setting_for(str(path))]) in kinds:
                yield name, (kind, path)


def _checkpoints(cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield each revision's folder, OWNER/NAME[@REVISION] without `main`, and its GGUF files."""
    for repository in sorted(cache.glob("models--*")):
        id = repository.name.removeprefix("models--")
        for ref in sorted(repository.glob("refs/*")):
            name, at = id.replace("--", "/"), "" if ref.name == "main" else f"@{ref.name}"
            with suppress(OSError, ValueError):
                if ref.stat().st_size == COMMIT_CHARS:
                    folder = repository / "snapshots" / ref.read_text()
                    yield name + at, folder
                    for file in sorted(folder.glob(f"*{GGUF}")):
                        yield f"{name}/{file.name}{at}", file
