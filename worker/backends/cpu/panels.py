"""The KV cache of a CPU. Its blocks have their numbers in the order of native attention's products
(native/panels.h), which read them in place; torch's attention copies them."""

from torch import Tensor

PANEL_WIDTH = 16  # columns of a panel of values, as in C++


class Panels:
    """Views of a layer's keys and values, both [blocks, block, heads, size], whose memory has the
    order of panels. A word is 32 bits. A key fills whole words."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        count, block, heads, size = values.shape
        word = 4 // keys.dtype.itemsize  # numbers
        width = size if size % PANEL_WIDTH else PANEL_WIDTH
        self.block, self.heads, self.word = block, heads, word
        # [blocks, block, heads, words of a key, word]
        keys = keys.view(count, heads, keys.shape[3] // word, block, word)
        self.keys = keys.permute(0, 3, 1, 2, 4)
        # [blocks, block / word, word, heads, panels, width]
        values = values.view(count, heads, size // width, block // word, width, word)
        self.values = values.permute(0, 3, 5, 1, 2, 4)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, heads, size] to slots [T]."""
        block, token, word = slots // self.block, slots % self.block, self.word
        self.keys[block, token] = keys.reshape(-1, *self.keys.shape[2:])
        rows = values.reshape(-1, *self.values.shape[3:])
        self.values[block, token // word, token % word] = rows

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of blocks, [len(blocks), block, heads, size] each."""
        shape = len(blocks), self.block, self.heads, -1
        keys, values = (x.index_select(0, blocks) for x in (self.keys, self.values))
        return keys.reshape(shape), values.reshape(shape)
