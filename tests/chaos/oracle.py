"""What the chaos family's results have to be, worked out in closed form: no array, no step, none of its code."""

from __future__ import annotations

from hashlib import blake2b

MOD = 1 << 64
MULTIPLIER, SEED_FACTOR, SLOPE = 6364136223846793005, 2862933555777941757, 3037000493


def expected(prompt: str, seed: int, *, width: int = 16, height: int = 16, steps: int = 4) -> bytes:
    """The one right result of a request: every latent is offset + index·slope, so every sum has a formula."""
    hashed = blake2b(prompt.encode(), digest_size=16).digest()
    embed_offset, embed_slope = int.from_bytes(hashed[:8], "little"), int.from_bytes(hashed[8:], "little")
    offset, slope = seed * SEED_FACTOR, SLOPE
    for step in range(steps):
        offset = (offset * MULTIPLIER + embed_offset + step + 1) % MOD
        slope = (slope * MULTIPLIER + embed_slope) % MOD
    count = width * height // 8
    plain = offset * count + slope * (count * (count - 1) // 2)
    weighted = offset * (count * (count + 1) // 2) + slope * ((count - 1) * count * (count + 1) // 3)
    last = offset + slope * (count - 1)
    sums = " ".join(f"{value % MOD:016x}" for value in (plain, weighted, last))
    return f"chaos {width}x{height} {steps} {seed} {sums}\n".encode()
