"""The encoder of media, and a cache of its outputs.

    tiles  --the model's forward, up to its decoder-->  rows: the decoder's inputs, one per token

A prompt of nothing but an item's placeholders is run as far as the decoder (DecoderHook). A tile
is encoded once however often it is sent. Which tile is encoded when is up to encoder_scheduler.py.

`VisionEncoder` runs on the worker's thread; the caches are safe for any thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from worker.model.decoder_hook import DecoderHook, DecoderRows, split_by_item
from worker.model.paged_runner import PagedRunner
from worker.vision.processor import MediaFeatures, MultimodalItem

MAX_FEATURES_BYTES = 16 << 20
MAX_ROWS_BYTES = 256 << 20
ENTRY_BYTES = 1 << 10  # of an entry beside its tensors
MAX_MULTIPLICATIONS = 1 << 32  # of a part of a product: some 0.05 s on two cores
CONVOLUTIONS = {functional.conv1d, functional.conv2d, functional.conv3d}
OPERATIONS = CONVOLUTIONS | {functional.linear, functional.scaled_dot_product_attention}

V = TypeVar("V")


class LRUCache(Generic[V]):
    """Values by digest, at most `max_bytes` of them. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def get(self, digest: bytes) -> V | None:
        with self._lock:
            if not (entry := self._entries.get(digest)):
                return None
            self._entries.move_to_end(digest)
            return entry[0]

    def put(self, digest: bytes, value: V, nbytes: int) -> None:
        """Add a value, unless its digest is there, and evict the least recently used ones."""
        with self._lock:
            if digest in self._entries:
                return
            self._entries[digest] = value, nbytes + ENTRY_BYTES
            self._bytes += nbytes + ENTRY_BYTES
            while self._bytes > self.max_bytes:
                _, (_, evicted) = self._entries.popitem(last=False)
                self._bytes -= evicted


@dataclass(eq=False)
class EncoderCache:
    """`features`: of media, without inputs of the encoder. `rows`: encoder outputs of tiles."""

    features: LRUCache[MediaFeatures] = field(default_factory=lambda: LRUCache(MAX_FEATURES_BYTES))
    rows: LRUCache[DecoderRows] = field(default_factory=lambda: LRUCache(MAX_ROWS_BYTES))

    def get(self, digest: bytes) -> MediaFeatures | None:
        """Return the features of an item whose tiles are all encoded."""
        item = self.features.get(digest)
        return item if item and all(tile.digest in self.rows for tile in item.tiles) else None


class VisionEncoder:
    """The part of a runner's model before its decoder. `tiles_encoded`: since construction."""

    def __init__(self, runner: PagedRunner, cache: EncoderCache) -> None:
        self.cache = cache
        self.tiles_encoded = 0
        self._runner = runner

    @property
    def hook(self) -> DecoderHook:
        """The runner's: it makes a new one when layers of the model are replaced."""
        hook = self._runner.decoder_hook
        assert hook
        return hook

    def encode(self, items: Sequence[MultimodalItem]) -> Sequence[DecoderRows]:
        """Encode items of equal shape in one run and cache their rows. Raises CannotRun if the
        decoder's inputs cannot be attributed to single tiles."""
        hook, width = self.hook, len(items[0].ids)
        device = hook.model.device
        decoder_inputs = hook.capture(
            input_ids=torch.tensor([item.ids for item in items], device=device),
            **{
                name: torch.cat([item.inputs[name] for item in items]).to(device)
                for name in items[0].inputs.keys() & hook.argument_names
            },
        )
        encoded = split_by_item(decoder_inputs, len(items), width)
        self.tiles_encoded += len(items)
        for item, rows in zip(items, encoded, strict=True):
            self.cache.rows.put(item.digest, rows, sum(tensor.nbytes for tensor in rows.values()))
        return encoded


class YieldingOperations(TorchFunctionMode):
    """Calls `before_operation` before each operation that may take long. Attention over many rows
    of a batch is computed in parts."""

    def __init__(self, before_operation: Callable[[], None]) -> None:
        super().__init__()
        self._before_operation = before_operation

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in OPERATIONS:
            self._before_operation()
        if function is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *others: Any,
        **options: Any,
    ) -> Tensor:
        attend, size = functional.scaled_dot_product_attention, len(query)
        parts = min(size, 2 * query.numel() * key.shape[-2] // MAX_MULTIPLICATIONS + 1)
        if parts < 2 or query.device.type != "cpu":
            return attend(query, key, value, attn_mask, *others, **options)
        inputs = [x.tensor_split(parts) for x in (query, key, value)]
        masks: Sequence[Tensor | None] = [attn_mask] * parts
        if attn_mask is not None and attn_mask.dim() == query.dim() and len(attn_mask) == size:
            masks = attn_mask.tensor_split(parts)
        outputs = []
        for part in zip(*inputs, masks, strict=True):
            self._before_operation()
            outputs.append(attend(*part, *others, **options))
        return torch.cat(outputs)


def divide_products(modules: Iterable[nn.Module], before_part: Callable[[], None]) -> None:
    """Have the linear layers among `modules` compute products of many rows in parts, and call
    `before_part` before each."""

    def divided(product: Callable[[Tensor], Tensor], weights: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            max_rows = max(1, MAX_MULTIPLICATIONS // weights)
            if len(rows) <= max_rows:
                return product(x)
            parts = []
            for part in torch.split(rows, max_rows):
                before_part()
                parts.append(product(part))
            return torch.cat(parts).view(*x.shape[:-1], -1)

        return forward

    for module in modules:
        in_features, out_features = (getattr(module, f"{end}_features", 0) for end in ("in", "out"))
        if weights := in_features * out_features:
            module.forward = divided(module.forward, weights)
