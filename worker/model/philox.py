"""Random numbers that are counted, not streamed: the same wherever and whenever they are drawn."""


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1), of 53 bits, that decides one output token.

    Philox-2x64-10 with key `seed` and counter (position, choice): Salmon, Moraes, Dror and Shaw,
    "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    mask = 2**64 - 1
    x, y, key = position & mask, choice & mask, seed & mask
    for _ in range(10):
        product = 0xD2B74407B1CE6E93 * x
        x, y = (product >> 64) ^ key ^ y, product & mask
        key = (key + 0x9E3779B97F4A7C15) & mask
    return (x >> 11) * 2.0**-53
