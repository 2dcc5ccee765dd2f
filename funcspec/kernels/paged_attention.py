"""Causal attention of ragged rows over a paged cache, with results that do not depend on a row's company.

Keys are walked in tiles at fixed absolute positions with an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).
A tile in which a query sees nothing multiplies by 1 and adds 0, so it changes no bit, and neither does anything else that
depends on the batch: the number of rows, the width of the table, the length of other rows.
"""

from functools import lru_cache

import torch
from torch.nn import functional as F

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._triton import jit, tl, triton
from funcspec.kernels.op import Op, next_power_of_2

KEY_TILE = 256
"""Keys in a tile of the torch reference."""

QUERY_TILE = 64
"""Query tokens that the torch reference treats at once."""

OFFSETS = torch.arange(KEY_TILE)

LOG2_E = 1.4426950408889634
"""Scores are in units of log 2: torch's exp2 is twice as fast as its exp, and many times as fast where it underflows."""

FAR = 1e38
"""Taken from the scores of hidden keys: finite, so that a query that has seen nothing yet never meets inf - inf."""


@jit
def hyperbolic_tangent(x):
    """Triton has none that the interpreter knows. Near 0, where the quotient cancels, five terms of the series."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.09, near, 1 - 2 / (tl.exp(2 * x) + 1))


@jit
def paged_attention_kernel(
    out_ptr,  # [T, heads, HEAD_DIM], written
    query_ptr,  # [T, heads, HEAD_DIM]
    key_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    value_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    block_tables_ptr,  # [R, N]
    seq_lens_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    positions_ptr,  # [T]
    sinks_ptr,  # [heads], or None
    scale,
    sliding_window,
    softcap,
    query_stride,
    query_head_stride,
    table_stride,
    table_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens of a program
    ROWS: tl.constexpr,  # query heads of a program, at least TOKENS * GROUP
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(query_start_loc_ptr + row).to(tl.int32) + tl.program_id(2) * TOKENS
    stop = tl.load(query_start_loc_ptr + row + 1).to(tl.int32)
    if first < stop:
        place = tl.arange(0, ROWS)
        lane = tl.arange(0, LANES)
        token = first + place // GROUP
        head = kv_head * GROUP + place % GROUP
        is_query = (place < TOKENS * GROUP) & (token < stop)
        in_head = lane < HEAD_DIM
        position = tl.load(positions_ptr + token, mask=is_query, other=-1).to(tl.int32)
        last_seen = tl.minimum(position, tl.load(seq_lens_ptr + row).to(tl.int32) - 1)
        end = tl.minimum(tl.max(last_seen, axis=0) + 1, table_width * BLOCK_SIZE)
        at = token.to(tl.int64)[:, None] * query_stride + head[:, None] * query_head_stride + lane[None, :]
        mask = is_query[:, None] & in_head[None, :]
        query = tl.load(query_ptr + at, mask=mask, other=0).to(tl.float32) * scale
        best = tl.full([ROWS], -3.4028234663852886e38, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, LANES], tl.float32)
        if sinks_ptr is not None:  # like a key with this score and a value of zeros
            best = tl.load(sinks_ptr + head, mask=is_query, other=0).to(tl.float32)
            total += 1
        base = 0
        if HAS_WINDOW:  # tiles that no query of this program sees are left out
            oldest = tl.min(tl.where(is_query, position, 2147483647), axis=0) - sliding_window + 1
            base = tl.maximum(oldest, 0) // KEYS * KEYS
        while base < end:
            key_position = base + tl.arange(0, KEYS)
            block = tl.load(
                block_tables_ptr + row.to(tl.int64) * table_stride + key_position // BLOCK_SIZE,
                mask=key_position < end,
                other=-1,
            ).to(tl.int64)
            is_key = block >= 0
            slot = block * BLOCK_SIZE + key_position % BLOCK_SIZE
            start = (slot * KV_HEADS + kv_head) * HEAD_DIM
            key = tl.load(key_ptr + start[None, :] + lane[:, None], mask=is_key[None, :] & in_head[:, None], other=0).to(tl.float32)
            value = tl.load(value_ptr + start[:, None] + lane[None, :], mask=is_key[:, None] & in_head[None, :], other=0).to(tl.float32)
            score = tl.dot(query, key, input_precision="ieee")
            if HAS_SOFTCAP:
                score = softcap * hyperbolic_tangent(score / softcap)
            seen = is_key[None, :] & (key_position[None, :] <= last_seen[:, None])
            if HAS_WINDOW:
                seen = seen & (key_position[None, :] > position[:, None] - sliding_window)
            score = tl.where(seen, score, float("-inf"))
            newest = tl.maximum(best, tl.max(score, axis=1))
            shrink = tl.exp(best - newest)
            weight = tl.exp(score - newest[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            mixed = mixed * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
            best = newest
            base += KEYS
        mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
        at = (token.to(tl.int64)[:, None] * (KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM + lane[None, :]
        tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty), mask=mask)


def _check(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    max_query_len: int,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        refuse(
            "key_cache",
            "[num_blocks, block_size, kv_heads, head_dim], like value_cache",
            (tuple(key_cache.shape), tuple(value_cache.shape)),
            "pass one layer of the pool",
        )
    if query.dim() != 3 or query.shape[2] != key_cache.shape[3] or query.shape[1] % key_cache.shape[2]:
        refuse(
            "query",
            f"[T, a multiple of {key_cache.shape[2]} heads, {key_cache.shape[3]}]",
            tuple(query.shape),
            "use the kv_spec that the pool was made with",
        )
    if query.shape[2] > 512:
        refuse("query", "a head_dim of at most 512", query.shape[2], "use a model with smaller heads")
    if out.shape != query.shape:
        refuse("out", tuple(query.shape).__repr__(), tuple(out.shape), "allocate it like query")
    rows = seq_lens.shape[0]
    if block_tables.dim() != 2 or block_tables.shape[0] != rows or query_start_loc.shape != (rows + 1,):
        refuse(
            "block_tables",
            f"{rows} rows as in seq_lens and {rows + 1} entries in query_start_loc",
            (tuple(block_tables.shape), tuple(query_start_loc.shape)),
            "pass arrays of one batch",
        )
    if positions.shape != query.shape[:1]:
        refuse("positions", f"{query.shape[0]} positions, one for each query token", tuple(positions.shape), "pass arrays of one batch")
    if max_query_len < 0:
        refuse("max_query_len", "0 or more", max_query_len, "pass the longest query of a row")
    for name, array in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
        ("positions", positions),
    ):
        if array.dtype not in (torch.int32, torch.int64):
            refuse(name, "int32 or int64", array.dtype, "convert it once, outside the loop", ArgumentTypeError)
    _check_variants(query.shape[1], sliding_window, softcap, sinks)


def _check_variants(heads: int, sliding_window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
    if sliding_window is not None:
        if not isinstance(sliding_window, int) or isinstance(sliding_window, bool):
            refuse("sliding_window", "an int or None", type(sliding_window).__name__, "pass a number of keys", ArgumentTypeError)
        if not 0 < sliding_window < 2**31:
            refuse("sliding_window", "1 to 2 ** 31 - 1 keys", sliding_window, "pass None where there is no window")
    if softcap is not None:
        if not isinstance(softcap, int | float) or isinstance(softcap, bool):
            refuse("softcap", "a number or None", type(softcap).__name__, "pass the bound of the scores", ArgumentTypeError)
        if not 0 < softcap < float("inf"):
            refuse("softcap", "a positive finite number", softcap, "pass None where scores are not capped")
    if sinks is not None and sinks.shape != (heads,):
        refuse("sinks", f"{heads} scores, one for each head", tuple(sinks.shape), "pass one score for each query head")


def _launch_paged_attention(
    *,
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    arrays = out, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, positions
    _check(*arrays, max_query_len, sliding_window, softcap, sinks)
    _, block_size, kv_heads, head_dim = key_cache.shape
    group = query.shape[1] // kv_heads
    # Tile sizes follow from the model alone: a size that followed the batch would reorder sums.
    rows = max(next_power_of_2(group), 16)
    tokens = rows // group
    grid = (seq_lens.shape[0], kv_heads, triton.cdiv(max_query_len, tokens))
    if 0 in grid:
        return
    paged_attention_kernel[grid](
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        positions,
        sinks,
        scale,
        sliding_window or 0,
        float(softcap or 0),
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        block_tables.shape[1],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TOKENS=tokens,
        ROWS=rows,
        KEYS=64 if head_dim <= 64 else 32 if head_dim <= 256 else 16,
        LANES=max(next_power_of_2(head_dim), 16),
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFTCAP=softcap is not None,
        num_warps=4,
    )


def _is_run(blocks: list[int]) -> bool:
    return blocks[0] >= 0 and blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def _gather(cache: torch.Tensor, blocks: list[int], offset: int, count: int) -> torch.Tensor:
    """One tile of keys or values in fp32: `count` tokens from `offset` in `blocks` on, then zeros.

    Returns:
        [KEY_TILE, kv_heads, head_dim]: a view of the cache where that is possible.
    """
    if _is_run(blocks):
        start = blocks[0] * cache.shape[1] + offset
        found = cache.flatten(0, 1)[start : start + count]
    else:
        ids = torch.tensor(blocks, device=cache.device)
        found = cache.index_select(0, ids.clamp(min=0))
        if -1 in blocks:
            found[ids < 0] = 0
        found = found.flatten(0, 1)[offset : offset + count]
    if count == KEY_TILE:
        return found.float()
    # What lies behind the row's keys may be anything, NaN included: it is not read, zeros stand in.
    tile = torch.empty((KEY_TILE, *found.shape[1:]), device=cache.device)
    tile[:count] = found
    tile[count:] = 0
    return tile


@lru_cache(maxsize=16)  # the same in every layer of a pass
def _visible(
    first_seen: tuple[int, ...] | None, last_seen: tuple[int, ...], start: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys of the tile at position `start` a query sees: those from its first, if it has one, up to its last.

    Returns:
        [rows, KEY_TILE] fp32, only to be read: 1 where it sees the key, else 0; and what to add to the scores for it.
    """
    offsets = OFFSETS.to(device)
    visible = torch.le(offsets, torch.tensor([seen - start for seen in last_seen], device=device)[:, None]).float()
    if first_seen is not None:
        visible *= torch.ge(offsets, torch.tensor([seen - start for seen in first_seen], device=device)[:, None])
    return visible, (visible - 1).mul_(FAR)


def _without_holes(visible: torch.Tensor, blocks: list[int], offset: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_visible` returns, with the keys of blocks that are -1 hidden."""
    owner = ((OFFSETS + offset) // block_size).clamp_(max=len(blocks) - 1)
    visible = visible * (torch.tensor(blocks)[owner] >= 0).to(visible.device)
    return visible, (visible - 1).mul_(FAR)


def _fold(query: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, int]:
    """Make rows of one product of the query heads of each kv head; returns [kv_heads, rows, head_dim] in fp32 and the zero rows in it.

    BLAS has other code, and so other rounding, for rows that do not fill a group of four: zero rows fill it, and a query's
    result does not depend on how many others there are.
    """
    count, heads, head_dim = query.shape
    group = heads // kv_heads
    rows = count * group
    padding = -rows % 4
    folded = query.reshape(count, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, rows, head_dim).float()
    return (F.pad(folded, (0, 0, 0, padding)) if padding else folded), padding


def _score(folded: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """[kv_heads, rows, KEY_TILE] scores in units of log 2."""
    if softcap is None:
        return torch.baddbmm(bias, folded, keys.permute(1, 2, 0), alpha=scale * LOG2_E)
    return torch.bmm(folded, keys.permute(1, 2, 0)).mul_(scale / softcap).tanh_().mul_(softcap * LOG2_E).add_(bias)


def _attend(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: list[int],
    first_seen: list[int] | None,
    last_seen: list[int],
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of some query tokens of one row, each of which sees the keys from its `first_seen`, if any, up to its `last_seen`."""
    count, heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    group = heads // kv_heads
    begin = 0 if first_seen is None else max(min(first_seen), 0) // KEY_TILE * KEY_TILE
    end = min(max(last_seen) + 1, len(table) * block_size)
    if end <= begin:
        out.zero_()
        return
    folded, padding = _fold(query, kv_heads)
    row_seen = tuple(seen for seen in last_seen for _ in range(group)) + (-1,) * padding
    row_first = None if first_seen is None else tuple(seen for seen in first_seen for _ in range(group)) + (0,) * padding
    best = total = mixed = torch.empty(0)
    started = sinks is not None
    if sinks is not None:  # like a key with this score and a value of zeros
        best = F.pad((sinks.float() * LOG2_E).view(kv_heads, 1, group).expand(-1, count, -1).flatten(1), (0, padding))[:, :, None]
        total, mixed = torch.ones_like(best), torch.zeros_like(folded)
    for start in range(begin, end, KEY_TILE):
        width = min(KEY_TILE, end - start)
        blocks = table[start // block_size : (start + width - 1) // block_size + 1]
        offset = start % block_size
        keys = _gather(key_cache, blocks, offset, width)
        values = _gather(value_cache, blocks, offset, width)
        visible, bias = _visible(row_first, row_seen, start, query.device)
        if -1 in blocks:
            visible, bias = _without_holes(visible, blocks, offset, block_size)
        score = _score(folded, keys, bias, scale, softcap)
        highest = score.amax(2, keepdim=True)
        newest = torch.maximum(best, highest) if started else highest
        weight = score.sub_(newest).exp2_().mul_(visible)
        tile_total, tile_mixed = weight.sum(2, keepdim=True), torch.bmm(weight, values.transpose(0, 1))
        if started:
            shrink = best.sub_(newest).exp2_()
            total, mixed = total.mul_(shrink).add_(tile_total), mixed.mul_(shrink).add_(tile_mixed)
        else:
            total, mixed = tile_total, tile_mixed
        best, started = newest, True
    mixed /= total.masked_fill_(total == 0, 1)
    rows = count * group
    out.view(count, kv_heads, group, head_dim).copy_(mixed[:, :rows].reshape(kv_heads, count, group, head_dim).transpose(0, 1))


def paged_attention_reference_(
    *,
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Specify `paged_attention_` in plain torch."""
    arrays = out, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, positions
    _check(*arrays, max_query_len, sliding_window, softcap, sinks)
    bounds, tables, places = query_start_loc.tolist(), block_tables.tolist(), positions.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        for first in range(bounds[row], bounds[row + 1], QUERY_TILE):
            stop = min(first + QUERY_TILE, bounds[row + 1])
            last_seen = [min(place, length - 1) for place in places[first:stop]]
            first_seen = None if sliding_window is None else [place - sliding_window + 1 for place in places[first:stop]]
            some = slice(first, stop)
            _attend(out[some], query[some], key_cache, value_cache, tables[row], first_seen, last_seen, scale, softcap, sinks)


paged_attention_ = Op(
    "paged_attention",
    writes=("out",),
    triton=_launch_paged_attention,
    reference=paged_attention_reference_,
    strided=("query", "block_tables"),
)
"""Attention of ragged rows over a paged cache; arithmetic in fp32 whatever the dtypes.

The query token at position p of row r sees the keys of its row at positions up to p and below seq_lens[r]. A query that sees
nothing gets zeros. Keys in places whose block is -1 are not seen. Tokens that belong to no row are neither read nor written.
Query heads g * group .. (g + 1) * group - 1 share kv head g.

Args:
    out: [T, heads, head_dim], contiguous, written; any float dtype.
    query: [T, heads, head_dim]; any float dtype.
    key_cache, value_cache: [num_blocks, block_size, kv_heads, head_dim], contiguous; head_dim at most 512.
    block_tables: [R, N] int32 or int64 block ids, -1 for none.
    seq_lens: [R] keys that a row may see.
    query_start_loc: [R + 1] exclusive prefix sums of query lengths.
    positions: [T] position of each query token in its row.
    scale: factor of the scores, usually head_dim ** -0.5.
    max_query_len: no query of a row may be longer; a host number.
    sliding_window: if given, the query at position p sees only keys at positions above p - sliding_window.
    softcap: if given, a score s becomes softcap * tanh(s / softcap).
    sinks: [heads] if given, scores of a further key in each head, whose value is zeros: it takes its share of the attention
        of queries that see at least one key. Not scaled, not capped, and in every window.

Raises:
    ArgumentError: shapes, layouts or bounds that do not fit.
    ArgumentTypeError: index arrays that are not int32 or int64, a window that is no int, a cap that is no number.
"""
