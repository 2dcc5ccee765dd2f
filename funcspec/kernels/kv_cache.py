"""Write the keys and values of new tokens into a paged cache, and copy whole blocks of it."""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._triton import jit, tl, triton
from funcspec.kernels.op import Op, next_power_of_2


@jit
def write_kv_kernel(
    key_ptr,  # [T, KV_HEADS, HEAD_DIM]
    value_ptr,  # [T, KV_HEADS, HEAD_DIM]
    slot_mapping_ptr,  # [T] int32 or int64
    out_key_ptr,  # [num_blocks * block_size, WIDTH], written
    out_value_ptr,  # [num_blocks * block_size, WIDTH], written
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # KV_HEADS * HEAD_DIM
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = lane < tl.where(slot >= 0, WIDTH, 0)
    head = lane // HEAD_DIM
    place = lane % HEAD_DIM
    key = tl.load(key_ptr + token * key_stride + head * key_head_stride + place, mask=mask, other=0)
    value = tl.load(value_ptr + token * value_stride + head * value_head_stride + place, mask=mask, other=0)
    tl.store(out_key_ptr + slot * WIDTH + lane, key.to(out_key_ptr.dtype.element_ty), mask=mask)
    tl.store(out_value_ptr + slot * WIDTH + lane, value.to(out_value_ptr.dtype.element_ty), mask=mask)


def _check_write(
    out_key_cache: torch.Tensor, out_value_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    for name, cache, new in (("key", out_key_cache, key), ("value", out_value_cache, value)):
        if cache.dim() != 4:
            refuse(
                f"out_{name}_cache",
                "[num_blocks, block_size, kv_heads, head_dim]",
                tuple(cache.shape),
                "pass one layer of the pool",
            )
        if new.dim() != 3 or new.shape[1:] != cache.shape[2:]:
            refuse(name, f"[T, {cache.shape[2]}, {cache.shape[3]}]", tuple(new.shape), "use the kv_spec that the pool was made with")
        if new.shape[0] != slots.shape[0]:
            refuse(
                "slot_mapping",
                f"{new.shape[0]} slots, one for each token of {name}",
                slots.shape[0],
                "pass -1 for tokens that write nothing",
            )
    if slots.dtype not in (torch.int32, torch.int64):
        refuse("slot_mapping", "int32 or int64", slots.dtype, "convert it once, outside the loop", ArgumentTypeError)


def _launch_write_kv(
    *,
    out_key_cache: torch.Tensor,
    out_value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    _check_write(out_key_cache, out_value_cache, key, value, slot_mapping)
    if key.shape[0] == 0:
        return
    heads, head_dim = key.shape[1:]
    write_kv_kernel[(key.shape[0],)](
        key,
        value,
        slot_mapping,
        out_key_cache,
        out_value_cache,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEAD_DIM=head_dim,
        WIDTH=heads * head_dim,
        LANES=next_power_of_2(heads * head_dim),
        num_warps=4,
    )


def write_kv_reference_(
    *,
    out_key_cache: torch.Tensor,
    out_value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Specify `write_kv_` in plain torch."""
    _check_write(out_key_cache, out_value_cache, key, value, slot_mapping)
    slots = slot_mapping.tolist()
    if slots and slots[0] >= 0 and slots == list(range(slots[0], slots[0] + len(slots))):
        run = slice(slots[0], slots[0] + len(slots))  # the usual case: no index arrays
        out_key_cache.flatten(0, 1)[run] = key
        out_value_cache.flatten(0, 1)[run] = value
        return
    written = slot_mapping >= 0
    places = slot_mapping[written].long()
    out_key_cache.flatten(0, 1)[places] = key[written].to(out_key_cache.dtype)
    out_value_cache.flatten(0, 1)[places] = value[written].to(out_value_cache.dtype)


write_kv_ = Op(
    "write_kv",
    writes=("out_key_cache", "out_value_cache"),
    triton=_launch_write_kv,
    reference=write_kv_reference_,
    strided=("key", "value"),
)
"""Write keys and values of T tokens to their slots; slot -1 writes nothing.

Args:
    out_key_cache, out_value_cache: [num_blocks, block_size, kv_heads, head_dim], contiguous, written.
    key, value: [T, kv_heads, head_dim], any strides over T and heads; cast to the cache's dtype.
    slot_mapping: [T] int32 or int64, block * block_size + offset, or -1. Slots of one call must differ.

Raises:
    ArgumentError: shapes that do not fit, or a cache that is not contiguous.
    ArgumentTypeError: slots that are not int32 or int64.
"""


@jit
def copy_blocks_kernel(
    cache_ptr,  # [num_layers, num_blocks, BLOCK_WIDTH], written
    source_ptr,  # [M]
    destination_ptr,  # [M]
    rows_ptr,  # [M]
    block_indices_ptr,  # [M]
    lengths_ptr,  # [R]
    layer_stride,
    block_size,
    BLOCK_WIDTH: tl.constexpr,  # values in one block
    LANES: tl.constexpr,
):
    copy = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(source_ptr + copy).to(tl.int64)
    destination = tl.load(destination_ptr + copy).to(tl.int64)
    row = tl.load(rows_ptr + copy)
    start = tl.load(block_indices_ptr + copy).to(tl.int64) * block_size
    named = tl.minimum(tl.minimum(source, destination), row.to(tl.int64)) >= 0
    length = tl.load(lengths_ptr + row, mask=named, other=0)  # an unnamed copy has reached nothing
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    mask = lane < tl.where(start < length, BLOCK_WIDTH, 0)
    base = cache_ptr + layer * layer_stride + lane
    tl.store(base + destination * BLOCK_WIDTH, tl.load(base + source * BLOCK_WIDTH, mask=mask, other=0), mask=mask)


def _check_copy(cache: torch.Tensor, *arrays: torch.Tensor) -> None:
    if cache.dim() < 3:
        refuse("cache", "[num_layers, num_blocks, block_size, ...]", tuple(cache.shape), "pass a buffer of the pool")
    names = ("source", "destination", "rows", "block_indices", "lengths")
    for name, array in zip(names, arrays, strict=True):
        if array.dtype not in (torch.int32, torch.int64):
            refuse(name, "int32 or int64", array.dtype, "convert it once, outside the loop", ArgumentTypeError)
        if array.dim() != 1 or (name != "lengths" and array.shape != arrays[0].shape):
            refuse(
                name,
                f"one dimension and, but for lengths, {arrays[0].shape[0]} entries",
                tuple(array.shape),
                "pass one entry for each copy",
            )


def _launch_copy_blocks(
    *,
    cache: torch.Tensor,
    source: torch.Tensor,
    destination: torch.Tensor,
    rows: torch.Tensor,
    block_indices: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    _check_copy(cache, source, destination, rows, block_indices, lengths)
    width = cache.stride(1)
    if source.shape[0] == 0 or cache.numel() == 0:
        return
    lanes = min(next_power_of_2(width), 1024)
    copy_blocks_kernel[(source.shape[0], cache.shape[0], triton.cdiv(width, lanes))](
        cache,
        source,
        destination,
        rows,
        block_indices,
        lengths,
        cache.stride(0),
        cache.shape[2],
        BLOCK_WIDTH=width,
        LANES=lanes,
        num_warps=4,
    )


def copy_blocks_reference_(
    *,
    cache: torch.Tensor,
    source: torch.Tensor,
    destination: torch.Tensor,
    rows: torch.Tensor,
    block_indices: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Specify `copy_blocks_` in plain torch."""
    _check_copy(cache, source, destination, rows, block_indices, lengths)
    named = ((source >= 0) & (destination >= 0) & (rows >= 0)).nonzero().squeeze(1)
    starts = block_indices[named].long() * cache.shape[2]
    wanted = named[starts < lengths[rows[named].long()]]
    if len(wanted):
        cache.index_copy_(1, destination[wanted].long(), cache.index_select(1, source[wanted].long()))


copy_blocks_ = Op("copy_blocks", writes=("cache",), triton=_launch_copy_blocks, reference=copy_blocks_reference_)
"""Copy block source[m] to block destination[m] in every layer, where the copy is named and the row has got that far.

A copy happens only if source[m], destination[m] and rows[m] are not negative and
block_indices[m] * block_size < lengths[rows[m]], so the host may name copies by capacity, without knowing lengths.

Args:
    cache: [num_layers, num_blocks, block_size, ...], contiguous, in place.
    source, destination: [M] int32 or int64 block ids. No block may be a destination twice, or both source and destination.
    rows: [M] the row for which the block is copied.
    block_indices: [M] place of the block in that row's table.
    lengths: [R] number of cached tokens of each row.

Raises:
    ArgumentError: shapes that do not fit, or a cache that is not contiguous.
    ArgumentTypeError: index arrays that are not int32 or int64.
"""
