"""Any decoder of Hugging Face transformers over a paged cache, by way of the library's own attention interface.

No model code is touched. Ragged rows are flattened to one row `[1, T]` with explicit positions; what the attention needs to know of
the batch travels as a keyword argument, which models hand on to the attention function that their configuration names.

A model is probed when it is wrapped: what its layers ask of the attention is recorded, and whatever cannot be honoured is refused.
"""

import copy
import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from funcspec.errors import ArgumentTypeError, FuncspecError, ModelError, refuse
from funcspec.models.base import KV, ForwardBatch, KVEntry, KVSpec
from funcspec.models.transformers_attention import (
    PAGED,
    PROBE,
    AttentionCall,
    AttentionLayer,
    AttentionPass,
    first_line,
    paged_attention,
    probe,
    probe_attention,
    probe_mask,
)

INSTALL = "pip install 'funcspec[huggingface]'"
"""How to get transformers."""

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LAYER_TYPES = frozenset({"attention", "full_attention", "sliding_attention"})
"""What a configuration may call its layers. Others keep a state, or compress or choose keys, and may not show it in two tokens."""

SCALED_BY_LENGTH = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Rotary embeddings that change for all tokens once a batch is long, and what the configuration calls the length where they do."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

CLOSE = {False: 0.05, True: 0.01}
"""How far logits may move, as a share of the largest, when a batch is cut otherwise; by whether the model has more than 16 bits.
Rounding moves them less, a wrong position or a state of the model's own far more."""


def _transformers() -> Any:
    """The package, with our attention functions known to it."""
    try:
        transformers = importlib.import_module("transformers")
        masking = importlib.import_module("transformers.masking_utils")
    except ImportError as error:
        found = "none" if isinstance(error, ModuleNotFoundError) and error.name == "transformers" else f"{error}"
        refuse("transformers", "the package, version 5 or later", found, INSTALL, ModelError)
    if int(transformers.__version__.split(".")[0]) < 5:
        refuse("transformers", "version 5 or later", transformers.__version__, f"{INSTALL} --upgrade", ModelError)
    transformers.AttentionInterface.register(PAGED, paged_attention)
    transformers.AttentionInterface.register(PROBE, probe_attention)
    masking.AttentionMaskInterface.register(PROBE, probe_mask)
    return transformers


@dataclass(frozen=True, eq=False)
class HuggingFaceModel:
    """A decoder of transformers as a `Model`; see `huggingface`.

    Attributes:
        lm: a twin of the wrapped model: modules and configuration of its own, the same weights.
        vocab_size: width of the logits.
        input_vocab_size: number of token ids that can be fed.
        max_len: number of positions.
        kv_spec: entries "key" and "value" of shape (kv_heads, head_dim); further pairs "key_1", "value_1", ... for layers of other shapes.
        vocab_fingerprint: digest of the vocabulary where it is known: drafter and target must agree in it.
        rope_axes: rotary positions of a token, 3 for models with M-RoPE; 0 where its position is the only one.
    """

    lm: Any = field(repr=False)
    vocab_size: int
    input_vocab_size: int
    max_len: int
    kv_spec: KVSpec
    vocab_fingerprint: str | None = None
    rope_axes: int = 0
    _layers: tuple[AttentionLayer, ...] = field(default=(), repr=False)
    _selects: bool = field(default=True, repr=False)

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return len(self._layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.lm.dtype

    @torch.no_grad()
    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run a batch; see `Model.forward`.

        Hidden state 0 is what the first layer reads, hidden state i what layer i - 1 leaves, and hidden state num_layers is normalised:
        what the output matrix is applied to.

        Args:
            kv: the buffers of `kv_spec`, `[num_layers, num_blocks, block_size, *shape]`, written in place.
            batch: what to run.

        Returns:
            kv, logits [M, vocab_size] of the dtype that the model gives them, and the wanted hidden states [T, hidden_size].

        Raises:
            ModelError: `hidden_layers` names a layer that is not there, or the model does not give hidden states.
        """
        if any(not 0 <= layer <= self.num_layers for layer in batch.hidden_layers):
            refuse("hidden_layers", f"numbers from 0 to {self.num_layers}", batch.hidden_layers, "name layers of this model", ModelError)
        wanted, this_pass = batch.logits_indices, AttentionPass(kv, batch, self._layers)
        selected = {"logits_to_keep": wanted.long()} if self._selects and wanted is not None else {}
        output = self.lm(
            input_ids=batch.input_ids.long()[None],
            position_ids=(batch.positions[None] if batch.rope_positions is None else batch.rope_positions[:, None]).long(),
            use_cache=False,
            output_hidden_states=bool(batch.hidden_layers),
            return_dict=True,
            funcspec=this_pass,
            **selected,
        )
        if this_pass.calls != self.num_layers:
            found = f"{this_pass.calls} calls"
            refuse("lm", f"{self.num_layers} attention calls", found, "use a model whose layers do not depend on the data", ModelError)
        logits = output.logits[0]
        if wanted is not None and not selected:
            logits = logits.index_select(0, wanted)
        return kv, logits, self._hidden(output, batch.hidden_layers)

    def _hidden(self, output: Any, layers: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        if not layers:
            return ()
        states = output.hidden_states
        if states is None or len(states) != self.num_layers + 1:
            found = "none" if states is None else len(states)
            refuse("hidden_layers", f"a model with {self.num_layers + 1} hidden states", found, "use another model class", ModelError)
        return tuple(states[layer][0] for layer in layers)


def huggingface(lm: Any, *, max_len: int | None = None, kv_dtype: torch.dtype | None = None) -> HuggingFaceModel:
    """Wrap a causal language model of Hugging Face transformers.

    The wrapped model shares the weights of `lm`; modules and configuration are a copy, so `lm` itself stays as it is: its attention
    function, its training mode, its use elsewhere. The copy is probed with two tokens, and refused unless its layers ask for
    attention that funcspec has: causal, with or without a sliding window, a soft cap, attention sinks.

    Args:
        lm: a `transformers.PreTrainedModel` with a language-model head, on one device.
        max_len: number of positions; by default the configuration's `max_position_embeddings`. More is possible where positions are
            plain rotary embeddings, though the model may never have seen such places.
        kv_dtype: of the cache: float32, bfloat16 or float16; by default that of the model's keys.

    Raises:
        ModelError: transformers is missing, or the model needs what funcspec does not have.
        ArgumentTypeError: `lm` is not a model of transformers, or another argument has the wrong type.

    Example:
        ```
        target = fs.models.huggingface(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-360M-Instruct"))
        drafter = fs.drafters.standalone(fs.models.huggingface(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")))
        ```
    """
    transformers = _transformers()
    _check_arguments(lm, transformers, max_len, kv_dtype)
    twin = _twin(lm)
    limit = _length_limit(twin, max_len)
    _set_attention(twin, transformers, PROBE)
    calls, logits, selects = probe(twin)
    _set_attention(twin, transformers, PAGED)
    _fix_rotary_embeddings(twin)
    input_vocab_size = twin.get_input_embeddings().weight.shape[0]
    if logits.shape[1] > input_vocab_size:
        refuse(
            "lm",
            f"at most as many outputs as its {input_vocab_size} input ids",
            logits.shape[1],
            "resize its embeddings to one number of tokens",
            ModelError,
        )
    spec, layers = _lay_out(calls, kv_dtype)
    model = HuggingFaceModel(twin, logits.shape[1], input_vocab_size, limit, spec, None, _rope_axes(twin), layers, selects)
    _check_rows_do_not_mix(model)
    return model


def _check_arguments(lm: Any, transformers: Any, max_len: object, kv_dtype: object) -> None:
    if not isinstance(lm, transformers.PreTrainedModel):
        fix = "pass what AutoModelForCausalLM.from_pretrained returns"
        if isinstance(lm, str | os.PathLike):
            fix = "load it with `load` of funcspec.models.huggingface"
        elif hasattr(lm, "merge_and_unload"):
            fix = "pass lm.merge_and_unload()"
        elif hasattr(lm, "_orig_mod"):
            fix = "pass the model before torch.compile"
        refuse("lm", "a transformers.PreTrainedModel", type(lm).__name__, fix, ArgumentTypeError)
    if max_len is not None and (not isinstance(max_len, int) or isinstance(max_len, bool)):
        refuse("max_len", "an int or None", type(max_len).__name__, "pass a number of positions", ArgumentTypeError)
    if kv_dtype is not None and (not isinstance(kv_dtype, torch.dtype) or kv_dtype not in KV_DTYPES):
        refuse("kv_dtype", "float32, bfloat16, float16 or None", kv_dtype, "use one of these", ArgumentTypeError)
    name = type(lm).__name__
    if getattr(lm.config, "is_encoder_decoder", False):
        refuse("lm", "a decoder-only model", f"{name}, an encoder and a decoder", "use a causal language model", ModelError)
    others = set(getattr(lm.config.get_text_config(), "layer_types", None) or ()) - LAYER_TYPES
    if others:
        fix = "use a model whose layers attend to keys and values of single tokens"
        refuse("lm", f"layers of {' or '.join(sorted(LAYER_TYPES))}", f"{sorted(others)} in {name}", fix, ModelError)
    if lm.get_output_embeddings() is None:
        refuse("lm", "a model with a language-model head", name, "load it with AutoModelForCausalLM", ModelError)
    places = sorted({str(tensor.device) for tensor in chain(lm.parameters(), lm.buffers())})
    if len(places) != 1 or places == ["meta"]:
        refuse("lm", "all weights on one device", " and ".join(places), "load it without a device map that spreads it", ModelError)


def _twin(lm: Any) -> Any:
    """A copy of the model's modules and configuration, in eval mode, over the same tensors."""
    shared = {id(tensor): tensor for tensor in chain(lm.parameters(), lm.buffers())}
    # Tensors that modules keep as plain attributes are not theirs to list, and as little to be copied.
    shared |= {id(kept): kept for module in lm.modules() for kept in vars(module).values() if isinstance(kept, torch.Tensor)}
    try:
        twin = copy.deepcopy(lm, shared).eval()
    except Exception as error:
        found = f"{type(error).__name__} when {type(lm).__name__} was copied: {first_line(error)}"
        refuse("lm", "modules that can be copied", found, "pass the model as it was loaded", ModelError)
    for module in twin.modules():
        if getattr(getattr(module, "config", None), "pad_token_id", None) is not None:
            module.config.pad_token_id = None  # some models look for padding in every pass, and wait for the GPU to see it
    return twin


def _set_attention(twin: Any, transformers: Any, name: str) -> None:
    for module in twin.modules():
        if isinstance(getattr(module, "config", None), transformers.PreTrainedConfig):
            module.config._attn_implementation = name


def _rotary_kinds(twin: Any) -> set[str]:
    """Kinds of rotary embeddings that the model has, as transformers names them."""
    found = [kind for module in twin.modules() if (kind := getattr(module, "rope_type", None)) is not None]
    return {name for kind in found for name in (kind.values() if isinstance(kind, Mapping) else [kind])}


def _length_limit(twin: Any, max_len: int | None) -> int:
    """The number of positions: the wanted one if the model can have it."""
    config = twin.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None)
    unlimited = any(name.endswith("inv_freq") for name, _ in twin.named_buffers())
    for kind, name in SCALED_BY_LENGTH.items():
        if any(kind in found for found in _rotary_kinds(twin)):
            # Past this length all tokens are rotated otherwise, those in the cache included.
            own, unlimited = _smallest(name, getattr(config, "rope_parameters", None) or {}, own), False
    if max_len is None:
        max_len = own
    if max_len is None:
        refuse("max_len", "a number, as the configuration has no max_position_embeddings", "None", "pass max_len", ModelError)
    if max_len < 2 or (own is not None and max_len > own and not unlimited):
        refuse("max_len", f"2 to {own} positions of {type(twin).__name__}", max_len, "pass fewer, or None", ModelError)
    return max_len


def _smallest(name: str, rotary: Mapping[str, Any], otherwise: int | None) -> int | None:
    """The smallest length of that name in the rotary parameters, which may be nested by kind of layer, or `otherwise`."""
    nested = [rotary, *(inner for inner in rotary.values() if isinstance(inner, Mapping))]
    return min((int(inner[name]) for inner in nested if inner.get(name)), default=otherwise)


def _rope_axes(twin: Any) -> int:
    """Rotary positions of a token: one for each section that a head is cut into, or 0."""
    rotary = getattr(twin.config.get_text_config(), "rope_parameters", None) or {}
    return len(rotary.get("mrope_section") or ())


def _fix_rotary_embeddings(twin: Any) -> None:
    """Keep rotary embeddings as they are for short batches: within the limit no others are needed, and none looks at positions to see."""

    def fixed(kind: str) -> str:
        return "default" if any(scaled in kind for scaled in SCALED_BY_LENGTH) else kind

    for module in twin.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, Mapping):
            module.rope_type = {layer: fixed(inner) for layer, inner in kind.items()}
        elif kind is not None:
            module.rope_type = fixed(kind)


def _lay_out(calls: list[AttentionCall], kv_dtype: torch.dtype | None) -> tuple[KVSpec, tuple[AttentionLayer, ...]]:
    """Where the cache keeps each layer: layers of one shape share a pair of buffers."""
    of_calls = [((call.kv_heads, call.width), kv_dtype or call.dtype) for call in calls]
    kinds = list(dict.fromkeys(of_calls))
    counts = [0] * len(kinds)
    entries, layers = [], []
    names = [(f"key{suffix}", f"value{suffix}") for suffix in ("" if kind == 0 else f"_{kind}" for kind in range(len(kinds)))]
    for (shape, dtype), pair in zip(kinds, names, strict=True):
        entries += [KVEntry(name, shape, dtype) for name in pair]
    for call, of_call in zip(calls, of_calls, strict=True):
        kind = kinds.index(of_call)
        layers.append(AttentionLayer(call, *names[kind], counts[kind]))
        counts[kind] += 1
    return KVSpec(max(counts), tuple(entries)), tuple(layers)


def _check_rows_do_not_mix(model: HuggingFaceModel) -> None:
    """Feed two tokens at once, then one by one behind tokens of another row: place in the batch and company may not matter."""
    last = model.max_len - 1
    try:
        kv = _empty_cache(model)
        whole = _feed(model, kv, 0, 2, company=0)
        kv = _empty_cache(model)
        parts = torch.cat([_feed(model, kv, start, 1, company=4) for start in range(2)])
    except FuncspecError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        refuse("lm", f"a model that runs at positions 0, 1 and {last}", what, "pass a smaller max_len", ModelError)
    moved = float((whole - parts).abs().nan_to_num().max() / whole.abs().nan_to_num().max().clamp(min=1e-30))
    if moved > CLOSE[torch.finfo(model.dtype).bits > 16]:
        refuse(
            "lm",
            "logits that depend on a row's own tokens and their positions alone",
            f"a change of {moved:.1%} when {type(model.lm).__name__} reads them in another company",
            "use a model that follows position_ids and has no state or scale across tokens but attention",
            ModelError,
        )


def _empty_cache(model: HuggingFaceModel) -> dict[str, torch.Tensor]:
    layers = model.kv_spec.num_layers
    return {
        entry.name: torch.zeros((layers, 1, 2, *entry.shape), dtype=entry.dtype, device=model.device) for entry in model.kv_spec.entries
    }


def _feed(model: HuggingFaceModel, kv: KV, start: int, count: int, *, company: int) -> torch.Tensor:
    """Logits [count, vocabulary] of tokens of one row, behind tokens of another row that are at the last position and see nothing."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=model.device)

    own, last, newest = range(start, start + count), model.max_len - 1, model.input_vocab_size - 1
    batch = ForwardBatch(
        input_ids=ints(*[min(2, newest)] * company, *(min(place, newest) for place in own)),
        positions=ints(*[last] * company, *own),
        query_start_loc=ints(0, company, company + count),
        seq_lens=ints(0, start + count),
        slot_mapping=ints(*[-1] * company, *own),
        block_tables=ints(0, 0)[:, None],
        logits_indices=None,
        max_query_len=max(company, count),
    )
    return model.forward(kv, batch)[1][company:].float()


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    local_files_only: bool = True,
) -> tuple[HuggingFaceModel, Any]:
    """Load a model directory, or a model of the local Hugging Face cache by its name, with its tokenizer.

    Args:
        path_or_name: what `AutoModelForCausalLM.from_pretrained` takes.
        dtype: of the weights.
        device: where to put them.
        local_files_only: False lets transformers download what is missing.

    Returns:
        the model, and its `transformers` tokenizer, or None where there is none.

    Raises:
        ModelError: transformers is missing or cannot load this, code from the model's directory would have to run, weights are missing,
            or the model is refused by `huggingface`.
    """
    transformers = _transformers()
    settings = {"local_files_only": local_files_only, "trust_remote_code": False}
    try:
        lm, report = transformers.AutoModelForCausalLM.from_pretrained(path_or_name, dtype=dtype, output_loading_info=True, **settings)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        fix = "pass a model directory of a class that transformers has, or local_files_only=False to download by name"
        refuse("path_or_name", "a causal language model", f"{type(error).__name__}: {first_line(error)}", fix, ModelError)
    missing = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        refuse("path_or_name", f"all weights of {type(lm).__name__}", f"{len(missing)} missing: {missing[:3]}", "complete it", ModelError)
    model = huggingface(lm.to(device))
    if not any(_has_file(transformers, path_or_name, name, local_files_only) for name in TOKENIZER_FILES):
        return model, None  # transformers would make an empty tokenizer of some classes
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path_or_name, **settings)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        refuse("path_or_name", "a tokenizer that transformers can load", first_line(error), "complete or remove its files", ModelError)
    return replace(model, vocab_fingerprint=_fingerprint(tokenizer)), tokenizer


def _has_file(transformers: Any, path_or_name: str | os.PathLike[str], name: str, local_files_only: bool) -> bool:
    try:
        return transformers.utils.cached_file(path_or_name, name, local_files_only=local_files_only) is not None
    except OSError:
        return False


def _fingerprint(tokenizer: Any) -> str:
    """Digest of the trained vocabulary; tokens added to it later, for chat or tools, differ between models of a family."""
    added = tokenizer.get_added_vocab()
    vocabulary = sorted((token, number) for token, number in tokenizer.get_vocab().items() if token not in added)
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
