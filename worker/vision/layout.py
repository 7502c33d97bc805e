"""How a prompt with pictures is laid out: positions, what sees what, and what its blocks are found
by; read off the model's own forward as it comes to its decoder, without its pixels.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from batching.scene import Content
from worker.model.entrance import Entrance, sees_next
from worker.model.pictures import Pictures


def lay_out(
    scene: Pictures, entrance: Entrance, ids: Sequence[int], inputs: Mapping[str, Tensor],
    digests: Sequence[bytes],
) -> None:  # fmt: skip
    """Fills in the scene. `inputs`: what the forward takes beside ids and pixels; `digests`: of the
    scene's pictures. CannotRun where the forward does not tell."""
    device = entrance.model.device
    given = entrance.captured(
        input_ids=torch.tensor([ids], device=device),
        **{name: each.to(device) for name, each in inputs.items()},
    )
    scene.positions = _positions(given.get("position_ids"), len(ids))
    scene.shift = int(scene.positions.max()) + 1 - len(ids)
    scene.blocks = _blocks(sees_next(given))
    ends = (stop for _, stop in (*scene.spans, *scene.blocks))
    scene.end = max(ends, default=0)
    text = torch.arange(scene.end, len(ids)) + scene.shift
    if not bool((scene.positions[:, scene.end :] == text).all()):
        scene.end = len(ids)
    scene.contents = _contents(ids, scene, digests)


def _positions(given: Tensor | None, width: int) -> Tensor:
    """[A, T] on the CPU, whatever axes a model has for them and for the batch."""
    positions = torch.arange(width) if given is None else given.cpu()
    return positions.reshape(-1, width)


def _blocks(sees_next: Tensor) -> list[tuple[int, int]]:
    """Runs of tokens that each see the next."""
    blocks: list[tuple[int, int]] = []
    start = None
    for place, sees in enumerate(sees_next.tolist()):
        if sees and start is None:
            start = place
        elif not sees and start is not None:
            blocks.append((start, place + 1))
            start = None
    return blocks


def _contents(ids: Sequence[int], scene: Pictures, digests: Sequence[bytes]) -> list[Content]:
    """Token ids, but of pictures their digests; and since the tokens of a block depend on all of
    it, of blocks theirs."""
    contents: list[Content] = [*ids]
    for (start, stop), digest in zip(scene.spans, digests, strict=True):
        contents[start:stop] = [digest] * (stop - start)
    for start, stop in scene.blocks:
        whole = hashlib.blake2b(repr(contents[start:stop]).encode(), digest_size=16).digest()
        contents[start:stop] = [whole] * (stop - start)
    return contents
