"""One query token a row against a long cache, on a GPU: the keys are cut into splits that run side by side.

`torch`'s attention gives a block of threads to each pair of row and key head: 64 at batch 8, on 132 multiprocessors,
and one of them walks all 3,000 keys. Here a pair has `SPLITS` blocks; their partial sums are joined afterwards, each
weighted by its own normaliser (flash decoding, arXiv:2205.14135 section 3 applied to keys). The query heads that share
a key head are rows of one tile, so a key is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLITS = 8
BLOCK = 64
ROWS = 16  # a tile's rows: tl.dot wants 16


@triton.jit
def _attend(
    q, k, v, valid, cursor, part, top, total,
    capacity,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    pair, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(cursor) + 1
    chunk = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    first = split * chunk
    last = tl.minimum(first + chunk, length)
    rows, columns, at = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    query = tl.load(q + (pair * GROUP + rows)[:, None] * WIDTH + columns[None], mask=rows[:, None] < GROUP, other=0.0)
    peak = tl.full([ROWS], -1e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    base = pair.to(tl.int64) * capacity
    for start in range(first, last, BLOCK):
        index = start + at
        inside = index < last
        seen = inside & (tl.load(valid + (pair // HEADS) * capacity + index, mask=inside, other=0) != 0)
        place = (base + index)[:, None] * WIDTH + columns[None]
        keys = tl.load(k + place, mask=inside[:, None], other=0.0)
        values = tl.load(v + place, mask=inside[:, None], other=0.0)
        score = tl.where(seen[None], tl.dot(query, tl.trans(keys)) * SCALE, -1e30)
        above = tl.maximum(peak, tl.max(score, 1))
        share = tl.where(seen[None], tl.exp(score - above[:, None]), 0.0)
        fade = tl.exp(peak - above)
        norm = norm * fade + tl.sum(share, 1)
        sums = sums * fade[:, None] + tl.dot(share.to(values.dtype), values)
        peak = above
    out = (pair * SPLITS + split) * GROUP + rows
    tl.store(part + out[:, None] * WIDTH + columns[None], sums, mask=rows[:, None] < GROUP)
    tl.store(top + out, peak, mask=rows < GROUP)
    tl.store(total + out, norm, mask=rows < GROUP)


def attend(query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, cursor: Tensor, scale: float) -> Tensor:
    """Attention of one token a row over the keys up to and with `cursor`.

    Args:
        query: [B,H,G,D], G query heads to each of H key heads.
        keys: [B,H,C,D] contiguous.
        values: likewise.
        valid: [B,C] u8, 0 where a key is not to be seen.
        cursor: [1] i64 on the device.
        scale: of the scores.

    Returns:
        [B,H,G,D].

    """
    rows, heads, group, width = query.shape
    shape = (rows, heads, SPLITS, group)
    part = torch.empty(*shape, width, device=query.device, dtype=torch.float32)
    top, total = (torch.empty(shape, device=query.device, dtype=torch.float32) for _ in range(2))
    _attend[(rows * heads, SPLITS)](
        query, keys, values, valid, cursor, part, top, total, keys.shape[2],
        HEADS=heads, GROUP=group, WIDTH=width, BLOCK=BLOCK, SPLITS=SPLITS, ROWS=ROWS, SCALE=scale,
    )  # fmt: skip
    weight = torch.exp(top - top.amax(2, keepdim=True))
    joined = (part * weight[..., None]).sum(2) / (total * weight).sum(2)[..., None]
    return joined.to(query.dtype)
