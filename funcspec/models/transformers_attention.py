"""The attention functions that wrapped models of Hugging Face transformers run: one that works on a paged cache, one that takes notes.

Ragged rows are flattened to one row `[1, T]`; what the attention needs to know of the batch travels as a keyword argument, which
models hand on to the attention function that their configuration names.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from funcspec.errors import FuncspecError, ModelError, refuse
from funcspec.kernels.kv_cache import write_kv_
from funcspec.kernels.paged_attention import paged_attention_
from funcspec.models.base import KV, ForwardBatch

PAGED = "funcspec_paged"
"""Name of the attention function of wrapped models. It has no mask function: transformers then makes no mask, and looks at no data."""

PROBE = "funcspec_probe"
"""Name of the attention function, and of the mask function, of a model that is being probed."""

OTHER_MASK = -1
"""A mask that is neither causal nor a causal sliding window."""

MAX_HEAD_DIM = 512
"""What `paged_attention_` takes."""

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

HARMLESS = frozenset({"cache_position", "is_causal", "output_router_logits", "position_ids", "use_cache"})
"""Keyword arguments of the attention function that change nothing: the mask says what is causal, and rotation has been done."""


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks of the attention.

    Attributes:
        module: the layer's module that calls the attention function.
        kv_heads: heads of keys and values.
        width: head_dim of keys or of values, whichever is larger; the other is filled up with zeros.
        dtype: of the keys.
        scale: factor of the scores.
        window: keys that a query sees at most, itself included.
        softcap: bound of the scores.
    """

    module: nn.Module
    kv_heads: int
    width: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class AttentionLayer:
    """A call, and where the cache keeps its keys and values."""

    call: AttentionCall
    key: str
    value: str
    index: int


class AttentionPass:
    """One forward as its attention calls see it."""

    def __init__(self, kv: KV, batch: ForwardBatch, layers: Sequence[AttentionLayer]) -> None:
        self.kv, self.batch, self.layers = kv, batch, layers
        self.calls = 0

    def next(self, module: nn.Module) -> AttentionLayer:
        """The layer whose turn it is."""
        if self.calls == len(self.layers) or self.layers[self.calls].call.module is not module:
            refuse(
                "lm",
                "the attention calls of the probe, in their order",
                f"another call number {self.calls} by {type(module).__name__}",
                "use a model whose layers do not depend on the data",
                ModelError,
            )
        self.calls += 1
        return self.layers[self.calls - 1]


def _rows_of(states: torch.Tensor, width: int) -> torch.Tensor:
    """[1, heads, T, head_dim] as [T, heads, width], filled up with zeros."""
    rows = states[0].transpose(0, 1)
    if rows.shape[2] < width:
        return F.pad(rows, (0, width - rows.shape[2]))
    return rows if rows.stride(2) == 1 else rows.contiguous()


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    funcspec: AttentionPass,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of wrapped models: write keys and values to the cache, attend over it."""
    if attention_mask is not None:
        found, fix = f"one from {type(module).__name__}", "use a model whose masks do not depend on the length of a batch"
        refuse("lm", "no mask, as in the probe", found, fix, ModelError)
    layer, batch = funcspec.next(module), funcspec.batch
    call, width = layer.call, layer.call.width
    key_cache, value_cache = funcspec.kv[layer.key][layer.index], funcspec.kv[layer.value][layer.index]
    write_kv_(
        out_key_cache=key_cache,
        out_value_cache=value_cache,
        key=_rows_of(key, width),
        value=_rows_of(value, width),
        slot_mapping=batch.slot_mapping,
    )
    rows = _rows_of(query, width)
    out = rows.new_zeros(rows.shape)  # places that belong to no row stay zero
    paged_attention_(
        out=out,
        query=rows,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        positions=batch.positions,
        scale=call.scale,
        max_query_len=batch.max_query_len,
        sliding_window=call.window,
        softcap=call.softcap,
        sinks=s_aux,
    )
    return out[None, :, :, : value.shape[3]], None


def probe_mask(*, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    """The mask function of a probe: instead of drawing a mask, say what it is.

    The wanted mask is looked at around the places where a window, or a chunk, of that size would begin and end. Models make masks that
    none of their layers uses, so none is refused here.

    Returns:
        [1, 1, 2, 2] int64, all the same: 0 for a causal mask, the size of a sliding window, or `OTHER_MASK`.
    """
    window = int(local_size or 0)
    places = sorted({base + near for base in (0, window, 2 * window) for near in range(-2, 3) if base + near >= 0})
    queries = torch.tensor(places, device=device)[:, None]
    keys = queries.T
    expected = keys <= queries
    if local_size is not None:
        expected &= keys > queries - window
    drawn = torch.as_tensor(mask_function(0, 0, queries, keys)).expand_as(expected)
    known = local_size != 0 and torch.equal(drawn, expected)
    return torch.full((1, 1, 2, 2), window if known else OTHER_MASK, dtype=torch.int64, device=device)


def probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    funcspec: list[AttentionCall] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a probe: note what is asked for, refuse what cannot be done, attend to nothing."""
    who = type(module).__name__
    if funcspec is None:
        fix = "use a model whose layers pass them on"
        refuse("lm", "keyword arguments handed on to the attention", f"none in {who}", fix, ModelError)
    for name, given in others.items():
        if given is not None and given is not False and name not in HARMLESS:
            refuse("lm", "attention that is known here", f"{name!r} from {who}", "use a model that does without it", ModelError)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dtype != torch.int64:
        found = "no mask" if attention_mask is None else "a mask or bias of its own"
        refuse("lm", "the masks of transformers.masking_utils", f"{found} in {who}", "use a causal decoder without such biases", ModelError)
    found = int(attention_mask.flatten()[0])
    if found == OTHER_MASK:
        fix = "use a causal decoder without chunks or prefixes"
        refuse("lm", "causal attention, plain or in a sliding window", f"another mask in {who}", fix, ModelError)
    window = found or None
    if sliding_window is not None and sliding_window != window:
        both = f"{sliding_window} in the attention and {window} in the mask of {who}"
        refuse("lm", "one sliding window", both, "correct the configuration", ModelError)
    if scaling is not None and not isinstance(scaling, int | float):
        refuse("lm", "a number as the attention's scaling", type(scaling).__name__, "use a model with a fixed scaling", ModelError)
    if dropout:
        refuse("lm", "no dropout in eval mode", f"{dropout} in {who}", "set the dropout of the configuration to 0", ModelError)
    heads, width, kv_heads, value_width = query.shape[1], query.shape[3], key.shape[1], value.shape[3]
    expected = (1, heads, 2, width), (1, kv_heads, 2, width), (1, kv_heads, 2, value_width)
    shapes = tuple(tuple(states.shape) for states in (query, key, value))
    if shapes != expected or heads % kv_heads:
        refuse("lm", "queries, keys and values of two tokens", f"{shapes} in {who}", "use a plain decoder", ModelError)
    if max(width, value_width) > MAX_HEAD_DIM:
        found = f"{max(width, value_width)} in {who}"
        refuse("lm", f"a head_dim of at most {MAX_HEAD_DIM}", found, "use a model with smaller heads", ModelError)
    if s_aux is not None and s_aux.shape != (heads,):
        refuse("lm", f"{heads} attention sinks, one a head", f"{tuple(s_aux.shape)} in {who}", "use a plain decoder", ModelError)
    scale = width**-0.5 if scaling is None else float(scaling)
    cap = None if softcap is None else float(softcap)
    funcspec.append(AttentionCall(module, kv_heads, max(width, value_width), key.dtype, scale, window, cap))
    return value.new_zeros((1, 2, heads, value_width)), None


@torch.no_grad()
def probe(lm: Any) -> tuple[list[AttentionCall], torch.Tensor, bool]:
    """Run two tokens through a model whose attention takes notes.

    Returns:
        the attention calls, the last token's logits [1, vocabulary], and whether the model selects tokens by index itself.
    """
    name, config, device = type(lm).__name__, lm.config.get_text_config(), lm.get_input_embeddings().weight.device
    calls: list[AttentionCall] = []
    parameters = inspect.signature(lm.forward).parameters
    if "position_ids" not in parameters:
        refuse("lm", "a model that takes position_ids", f"{name}, which does not", "use a causal language model", ModelError)
    selects = "logits_to_keep" in parameters
    selected = {"logits_to_keep": torch.tensor([1], device=device)} if selects else {}
    ids, positions = torch.zeros((1, 2), dtype=torch.int64, device=device), torch.arange(2, device=device)[None]
    try:
        output = lm(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True, funcspec=calls, **selected)
        logits = output.logits
    except FuncspecError:
        raise
    except Exception as error:
        found = f"{type(error).__name__} from {name}: {first_line(error)}"
        refuse("lm", "a decoder that runs two tokens with position_ids", found, "use a causal language model", ModelError)
    if len(calls) != config.num_hidden_layers:
        refuse(
            "lm",
            f"{config.num_hidden_layers} layers of attention in {name}",
            f"{len(calls)} calls of the attention function",
            "use a model without recurrent or linear layers, of a class that uses transformers' attention interface",
            ModelError,
        )
    expected = (1, 1 if selects else 2)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[:2] != expected or logits.dtype not in LOGITS_DTYPES:
        found = f"{list(logits.shape)} {logits.dtype}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        refuse("lm", f"float logits {[*expected, 'vocabulary']} from {name}", found, "use a causal language model", ModelError)
    return calls, logits[0, -1:], selects


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or "no message").splitlines()[0]
