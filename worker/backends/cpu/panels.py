"""The KV cache of a CPU. Its blocks have their numbers in the order of native attention's products
(native/panels.h), which read them in place; torch's attention copies them."""

from torch import Tensor

from worker.model.attention.kv_cache import BLOCK, KVCache, LayerShape

PANEL_WIDTH = 16  # columns of a panel of values, as in C++


class PanelCache(KVCache):
    """Panels, except of layers with values in their keys, or keys that do not fill words."""

    def is_panels(self, layer: LayerShape) -> bool:
        return not layer.values_in_keys and layer.key_size % self._word == 0

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        if not self.panels[layer]:
            return super().write(layer, slots, keys, values)
        key_rows, value_rows = self._rows(layer)
        block, token, word = slots // BLOCK, slots % BLOCK, self._word
        key_rows[block, token] = keys.reshape(-1, *key_rows.shape[2:])
        value_rows[block, token // word, token % word] = values.reshape(-1, *value_rows.shape[3:])
        return None

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        if not self.panels[layer]:
            return super().gather(layer, blocks)
        shape, (keys, values) = (len(blocks), BLOCK, self.layers[layer].heads), self._rows(layer)
        return (
            keys.index_select(0, blocks).reshape(*shape, -1),
            values.index_select(0, blocks).reshape(*shape, -1),
        )

    @property
    def _word(self) -> int:
        """Numbers of 32 bits."""
        return 4 // self.dtype.itemsize

    def _rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of keys and values [blocks, BLOCK, heads, size], of which some dimensions
        are two."""
        keys, values, word = self.keys[layer], self.values[layer], self._word
        count, _, heads, size = values.shape
        width = size if size % PANEL_WIDTH else PANEL_WIDTH
        value_shape = count, heads, -1, BLOCK // word, width, word
        return (
            keys.view(count, heads, -1, BLOCK, word).permute(0, 3, 1, 2, 4),
            values.view(value_shape).permute(0, 3, 5, 1, 2, 4),
        )
