"""Sample with noise from outside: for engines that bring their own generator, and to compare choices with theirs.

`choose_tokens_` draws its own noise and is what rounds use.
"""

import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import INDEX_DTYPES, check_index_array
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.noise import gumbel, gumbel_reference
from funcspec.kernels.op import Op

BLOCK = 1024
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def gumbel_sample_kernel(
    logits_ptr,  # [T, V]
    idx_mapping_ptr,  # [T]
    temperature_ptr,  # [S] float32
    noise_words_ptr,  # [T, V] int32
    logits_cache_ptr,  # [S, C, >= V], written when HAS_CACHE
    logits_cache_col_ptr,  # [T] or [], read when HAS_CACHE
    out_tokens_ptr,  # [T], written
    logits_stride,
    words_stride,
    state_stride,
    column_stride,
    column_step,
    num_columns,
    num_states,
    vocab_size,
    APPLY_TEMPERATURE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    place = tl.program_id(0).to(tl.int64)
    state = tl.load(idx_mapping_ptr + place).to(tl.int64)
    winner = tl.full((), -1, tl.int64)
    if (state >= 0) & (state < num_states):
        temperature = tl.load(temperature_ptr + state)
        divisor = tl.where(temperature > 0, temperature, 1.0)
        cache_end = tl.full((), 0, tl.int64)
        cache_row_ptr = logits_cache_ptr
        if HAS_CACHE:
            column = tl.load(logits_cache_col_ptr + place * column_step).to(tl.int64)
            cache_end = tl.where((column >= 0) & (column < num_columns), vocab_size, cache_end)
            cache_row_ptr = logits_cache_ptr + state * state_stride + column * column_stride
        best = tl.full((), float("-inf"), tl.float32)
        winner = tl.full((), 0, tl.int64)
        start = tl.full((), 0, tl.int64)
        while start < vocab_size:
            token = start + tl.arange(0, BLOCK)
            raw = tl.load(logits_ptr + place * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
            if HAS_CACHE:
                tl.store(cache_row_ptr + token, raw, mask=token < cache_end)
            score = raw.to(tl.float32)
            score = tl.where((score != score) | (score == float("inf")), float("-inf"), score)
            if temperature > 0:
                if APPLY_TEMPERATURE:
                    score = tl.div_rn(score, divisor)
                words = tl.load(noise_words_ptr + place * words_stride + token, mask=token < vocab_size, other=0)
                score = score + gumbel(words.to(tl.uint32, bitcast=True))
            top = tl.max(score, axis=0)
            lowest = tl.min(tl.where(score == top, token, vocab_size), axis=0)
            winner = tl.where(top > best, lowest, winner)
            best = tl.maximum(best, top)
            start += BLOCK
    tl.store(out_tokens_ptr + place, winner)


def _check_matrix(name: str, matrix: torch.Tensor, dtypes: tuple[torch.dtype, ...], rows: int, columns: int) -> None:
    if matrix.dtype not in dtypes:
        refuse(name, " or ".join(map(str, dtypes)), matrix.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if matrix.dim() != 2 or matrix.shape[0] < rows or matrix.shape[1] < columns:
        found = f"shape {tuple(matrix.shape)}"
        refuse(name, f"at least {rows} rows of at least {columns} entries", found, "pass arrays of one batch")


def _check(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    noise_words: torch.Tensor,
    logits_cache: torch.Tensor | None,
    logits_cache_col: torch.Tensor | None,
    out_tokens: torch.Tensor,
) -> None:
    _check_matrix("logits", logits, LOGIT_DTYPES, 0, 1)
    places, vocab_size = logits.shape
    check_index_array("idx_mapping", idx_mapping, places)
    if temperature.dtype != torch.float32:
        refuse("temperature", "float32", temperature.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if temperature.dim() != 1:
        refuse("temperature", "a 1-D array", f"shape {tuple(temperature.shape)}", "pass one temperature for each state")
    _check_matrix("noise_words", noise_words, (torch.int32,), places, vocab_size)
    check_index_array("out_tokens", out_tokens, places)
    if logits_cache is None or logits_cache_col is None:
        if logits_cache is not logits_cache_col:
            found = "one of the two"
            refuse("logits_cache_col", "a column for the cache, or neither", found, "pass logits_cache and logits_cache_col, or none")
        return
    if logits_cache.dtype != logits.dtype:
        refuse("logits_cache", f"{logits.dtype}, as the logits are", logits_cache.dtype, "allocate it like the logits", ArgumentTypeError)
    states = temperature.shape[0]
    if logits_cache.dim() != 3 or logits_cache.shape[0] < states or logits_cache.shape[2] < vocab_size:
        found = f"shape {tuple(logits_cache.shape)}"
        refuse("logits_cache", f"[>= {states}, C, >= {vocab_size}]", found, "allocate a row for each state")
    if logits_cache_col.dim() == 0 and logits_cache_col.dtype in INDEX_DTYPES:
        return
    check_index_array("logits_cache_col", logits_cache_col, places)


def _launch_gumbel_sample(
    *,
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    noise_words: torch.Tensor,
    apply_temperature: bool = True,
    logits_cache: torch.Tensor | None = None,
    logits_cache_col: torch.Tensor | None = None,
    out_tokens: torch.Tensor,
) -> None:
    _check(logits, idx_mapping, temperature, noise_words, logits_cache, logits_cache_col, out_tokens)
    places, vocab_size = logits.shape
    if places == 0:
        return
    gumbel_sample_kernel[(places,)](
        logits,
        idx_mapping,
        temperature,
        noise_words,
        logits if logits_cache is None else logits_cache,
        idx_mapping if logits_cache_col is None else logits_cache_col,
        out_tokens,
        logits.stride(0),
        noise_words.stride(0),
        0 if logits_cache is None else logits_cache.stride(0),
        0 if logits_cache is None else logits_cache.stride(1),
        0 if logits_cache_col is None else logits_cache_col.dim(),
        0 if logits_cache is None else logits_cache.shape[1],
        temperature.shape[0],
        vocab_size,
        APPLY_TEMPERATURE=apply_temperature,
        HAS_CACHE=logits_cache is not None,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


def gumbel_sample_reference_(
    *,
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    noise_words: torch.Tensor,
    apply_temperature: bool = True,
    logits_cache: torch.Tensor | None = None,
    logits_cache_col: torch.Tensor | None = None,
    out_tokens: torch.Tensor,
) -> None:
    """Specify `gumbel_sample_` in plain torch."""
    _check(logits, idx_mapping, temperature, noise_words, logits_cache, logits_cache_col, out_tokens)
    places, vocab_size = logits.shape
    state = idx_mapping[:places].long()
    exists = (state >= 0) & (state < temperature.shape[0])
    out_tokens[:places] = NO_TOKEN
    place = exists.nonzero()[:, 0]
    state = state[place]
    heat = temperature[state][:, None]
    raw = logits[place]
    scores = raw.float()
    scores = torch.where(scores.isnan() | (scores == torch.inf), -torch.inf, scores)
    noise = gumbel_reference(noise_words[place, :vocab_size].long() & 0xFFFFFFFF)
    heated = scores / torch.where(heat > 0, heat, 1.0) if apply_temperature else scores
    scores = torch.where(heat > 0, heated + noise, scores)
    top = scores.amax(1, keepdim=True)
    winner = torch.where(scores == top, torch.arange(vocab_size, device=logits.device), vocab_size).amin(1)
    out_tokens[place] = winner.to(out_tokens.dtype)
    if logits_cache is not None and logits_cache_col is not None:
        column = (logits_cache_col.expand(places) if logits_cache_col.dim() == 0 else logits_cache_col)[place].long()
        inside = (column >= 0) & (column < logits_cache.shape[1])
        logits_cache[state[inside], column[inside], :vocab_size] = raw[inside]


gumbel_sample_ = Op(
    "gumbel_sample",
    writes=("out_tokens", "logits_cache"),
    triton=_launch_gumbel_sample,
    reference=gumbel_sample_reference_,
    strided=("logits", "noise_words", "logits_cache"),
)
"""Choose a token for every row of logits with Gumbel noise from given words, and keep the logits it was drawn from.

T rows, V tokens, S request states. Row t of state s = idx_mapping[t] at temperature[s] above 0 scores its logits, divided by the
temperature where wanted, plus `funcspec.noise.gumbel` of its words; at temperature 0 the scores are the logits. The highest score
wins, ties go to the lowest id, NaN and +inf logits count as -inf, and token 0 stands for a row of nothing but -inf. Every backend
gives the same tokens. Small words win: a uniform number u that another engine drew is the word floor(u * 2^32), and 1 - u where that
engine lets large ones win.

With a cache the raw logits go to logits_cache[s, column, :V], bit by bit. Rows whose state is outside of [0, S) choose -1 and read
and keep nothing; a column that the cache does not have keeps nothing.

One program works through a row, so this is for comparisons rather than for speed.

Args:
    logits: [T, V] float32, bfloat16 or float16; any row stride, columns consecutive.
    idx_mapping: [T] int32 or int64, request state of each row; -1 for none.
    temperature: [S] float32, 0 or positive and finite.
    noise_words: [>= T, >= V] int32 bit patterns; any row stride, columns consecutive.
    apply_temperature: whether logits are divided by the temperature; False where that has been done.
    logits_cache: [>= S, C, >= V] of the logits' dtype, any strides but 1 in its columns, or None.
    logits_cache_col: [T] or 0-d int32 or int64, the column of each row or of all; exactly with a cache.
    out_tokens: [T] int32 or int64, written.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
