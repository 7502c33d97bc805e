"""LoRA adapters by name: `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM.

An adapter belongs to a chat model, its base, and is loaded with it. Requests keep the adapter that
they began with: an unloaded or replaced one is freed after the last of them.
"""

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request

from batching.errors import InvalidInput, NotReady
from batching.request_queue import WorkItem
from server.apis.openai.media import while_connected
from server.apis.openai.models import AdaptedModel, ModelGroup, NamedModel
from server.apis.openai.request_fields import convert_body
from server.core.settings import SERVED_NAME, Settings, SettingsError, parse_adapters
from server.http.access import check_admin
from server.http.errors import HttpError
from server.http.json import JsonBodyParser, parse_json
from server.http.operation import Operation, OperationRoute, routes_of
from server.http.request import read_json_request
from worker.load_context import LoadContext
from worker.messages.adapters import Adapter, InvalidAdapter

MAX_ADAPTERS = 128
MAX_PATH = 4096  # characters


class LoadAdapterRequest(Struct):
    lora_name: str
    lora_path: Annotated[str, Meta(max_length=MAX_PATH)]
    load_inplace: bool | None = None  # replace the adapter of this name
    base_model_name: str | None = None  # None: the first chat model


class UnloadAdapterRequest(Struct):
    lora_name: str


class AdapterResponse(Struct):
    success: bool
    message: str


class AdapterControl:
    """`chats`: the models that may have adapters; `named`: all whose names are taken."""

    def __init__(self, settings: Settings, chats: ModelGroup, named: ModelGroup) -> None:
        self.settings = settings
        self.chats = chats
        self.named = named
        self.body_parser = JsonBodyParser()
        self._loading: set[str] = set()  # names
        self._leaving: set[Adapter] = set()  # requests that have begun use them
        self._queue = chats.default.worker_client.queue
        metrics = chats.default.worker_client.metrics
        if settings.lora_dir != "none":
            metrics.max_adapters, metrics.adapter_names = MAX_ADAPTERS, self.names_in_use
            self._queue.on_released = self._on_released

    def routes(self) -> list[OperationRoute]:
        return routes_of(self.load, self.unload)

    def add_configured(self) -> None:
        """Add the adapters of LORA, which are loaded with their bases. Raises SettingsError."""
        bases = {base.id: base for base in self.chats.models}
        for reference in parse_adapters(self.settings):
            where = f"LORA={reference.entry!r}"
            base = bases.get(reference.base or self.chats.default.id)
            if base is None:
                known = ", ".join(map(repr, bases))
                raise SettingsError(f"{where}: base must be one of the chat models {known}")
            if self._is_taken(reference.name) or self._find(reference.name):
                raise SettingsError(f"{where}: the name is given twice")
            if len(self._all()) == MAX_ADAPTERS:
                raise SettingsError(f"LORA: at most {MAX_ADAPTERS} adapters are served")
            self._add(base, Adapter(reference.name, reference.path, self.settings.lora_dir))

    def names_in_use(self) -> tuple[list[str], list[str]]:
        """Return the names of adapters whose requests run, and of those whose requests wait."""
        running: dict[str, None] = {}
        waiting: dict[str, None] = {}
        for item in self._queue.items:
            if adapter := adapter_of(item):
                (running if item.started_at else waiting)[adapter.name] = None
        return sorted(running), sorted(waiting)

    # ── routes ──

    @Operation(
        "POST /v1/load_lora_adapter",
        "Load a LoRA adapter of a chat model",
        AdapterResponse,
        LoadAdapterRequest,
        errors=[403],
    )
    async def load(self, request: Request) -> AdapterResponse:
        """Read an adapter on the loader thread. An unloaded base is loaded first."""
        check_admin(request.scope)
        body, incoming = await read_json_request(request.scope, request.receive)
        document = await self.body_parser.run(parse_json, body, incoming.deadlines.first)
        wanted = convert_body(document, LoadAdapterRequest, request.scope)
        name, before = wanted.lora_name, self._check_name(wanted)
        base = before.base if before else self.chats.find(wanted.base_model_name)
        if base.adapter:
            raise InvalidInput.at("base_model_name", f"{base.id!r} is an adapter")
        adapter = Adapter(name, wanted.lora_path, self.settings.lora_dir)
        self._loading.add(name)
        try:
            async with base.loaded(incoming):
                loading = self._load(base, adapter)
                await while_connected(incoming, [loading], f"the adapter {name!r} was not loaded")
        except InvalidAdapter as error:
            raise InvalidInput.at("lora_path", str(error)) from error
        finally:
            self._loading.discard(name)
        if base.served.state != "ready" or adapter.weights is None:
            raise NotReady(f"the model {base.id!r} was unloaded meanwhile", 5)
        self._remove(name)
        self._add(base, adapter)
        return AdapterResponse(True, f"Success: LoRA adapter {name!r} added successfully.")

    async def _load(self, base: NamedModel, adapter: Adapter) -> None:
        """Load an adapter. If this is cancelled, nothing refers to the result."""
        client = base.worker_client
        context = LoadContext(client.worker.call, limit=client.worker.remaining_bytes)
        loading = client.worker.load_adapter(base.served, adapter, context)
        await client.manager.result(loading, lambda: context.progress_at, context.stop)

    def _check_name(self, wanted: LoadAdapterRequest) -> AdaptedModel | None:
        """Return the adapter that is to be replaced. Raises InvalidInput."""
        name = wanted.lora_name
        if self.settings.lora_dir == "none":
            raise InvalidInput.at("lora_path", "LORA_DIR is not set: adapters lie inside it")
        if not SERVED_NAME.fullmatch(name):
            raise InvalidInput.at("lora_name", "must have letters, digits and _ . : @ + / - alone")
        before = self._find(name)
        if self._is_taken(name):
            raise InvalidInput.at("lora_name", f"{name!r} is the name of a model")
        if name in self._loading:
            raise InvalidInput.at("lora_name", f"{name!r} is being loaded")
        if before and not wanted.load_inplace:
            reason = f"{name!r} is loaded: load_inplace=true replaces it"
            raise InvalidInput.at("lora_name", reason)
        if before and wanted.base_model_name not in (None, *before.base.names):
            reason = f"{name!r} is an adapter of {before.base.id!r}"
            raise InvalidInput.at("base_model_name", reason)
        if not before and len(self._all()) + len(self._loading) >= MAX_ADAPTERS:
            raise InvalidInput.at("lora_name", f"at most {MAX_ADAPTERS} adapters are served")
        return before

    @Operation(
        "POST /v1/unload_lora_adapter",
        "Refuse new requests for a LoRA adapter, and free it after the last one",
        AdapterResponse,
        UnloadAdapterRequest,
        errors=[403],
    )
    async def unload(self, request: Request) -> AdapterResponse:
        """Refuse new requests for an adapter; those that have begun finish with it."""
        check_admin(request.scope)
        body, incoming = await read_json_request(request.scope, request.receive)
        document = await self.body_parser.run(parse_json, body, incoming.deadlines.first)
        name = convert_body(document, UnloadAdapterRequest, request.scope).lora_name
        if not self._remove(name):
            message = f"there is no adapter {name[:200]!r}"
            raise HttpError(404, message, "lora_name", code="model_not_found")
        return AdapterResponse(True, f"Success: LoRA adapter {name!r} removed successfully.")

    # ── names ──

    def _all(self) -> list[AdaptedModel]:
        return [adapted for base in self.chats.models for adapted in base.adapters.values()]

    def _find(self, name: str) -> AdaptedModel | None:
        return next((adapted for adapted in self._all() if adapted.id == name), None)

    def _is_taken(self, name: str) -> bool:
        return any(name in model.names for model in self.named.models)

    def _add(self, base: NamedModel, adapter: Adapter) -> None:
        base.adapters[adapter.name] = AdaptedModel(base, adapter)
        base.served.adapters.append(adapter)

    def _remove(self, name: str) -> bool:
        if (adapted := self._find(name)) is None:
            return False
        del adapted.base.adapters[name]
        adapted.base.served.adapters.remove(adapted.adapter)
        self._leaving.add(adapted.adapter)
        self._free_unused(adapted.adapter)
        return True

    def _on_released(self, item: WorkItem) -> None:
        if self._leaving and (adapter := adapter_of(item)) in self._leaving:
            self._free_unused(adapter)

    def _free_unused(self, adapter: Adapter) -> None:
        """Free the weights of an adapter that is to leave, once no request needs them: the worker's
        thread refers to those of the requests that it runs."""
        if not any(adapter_of(item) is adapter for item in self._queue.items):
            self._leaving.remove(adapter)
            adapter.weights = None


def adapter_of(item: WorkItem) -> Adapter | None:
    adapter: Adapter | None = getattr(item.payload, "adapter", None)
    return adapter
