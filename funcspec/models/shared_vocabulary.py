"""A draft whose tokenizer is not the target's: it reads target ids, and drafts the tokens that both vocabularies have."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from funcspec.errors import ArgumentTypeError, ModelError, check_int, refuse, type_name
from funcspec.models.base import KV, Array, ForwardBatch, KVSpec, Model

LARGEST_ID = 2**31 - 1

TRAITS = ("device", "dtype", "framework", "hidden_size", "num_layers", "rope_axes")
"""What a model may say about itself that holds for it in any vocabulary."""


@dataclass(frozen=True, eq=False)
class SharedVocabulary:
    """A model that reads target ids, with one output for each token that it shares with the target; see `shared_vocabulary`.

    Attributes:
        model: the model itself.
        input_token_ids: [input_vocab_size] int32, the id of the model that each target id is read as.
        output_columns: [vocab_size] int32, the columns of the model's logits that are kept.
        output_token_ids: [vocab_size] int32, the target id that each of them stands for.
    """

    model: Model
    input_token_ids: Array
    output_columns: Array
    output_token_ids: Array

    def __getattr__(self, name: str) -> Any:
        """What else the model says about itself, if it does and it has nothing to do with vocabularies."""
        if name not in TRAITS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.model, name)

    @property
    def vocab_size(self) -> int:
        """Number of shared tokens that can be drafted: width of the logits."""
        return self.output_columns.shape[0]

    @property
    def input_vocab_size(self) -> int:
        """Number of target ids, all of which can be fed."""
        return self.input_token_ids.shape[0]

    @property
    def max_len(self) -> int:
        """Number of positions."""
        return self.model.max_len

    @property
    def kv_spec(self) -> KVSpec:
        """That of the model."""
        return self.model.kv_spec

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, Array, tuple[Array, ...]]:
        """Run the model on a batch of target ids; see `Model.forward`.

        Args:
            kv: as for the model.
            batch: what to run, `input_ids` in target ids.

        Returns:
            kv, logits [M, vocab_size] of the shared tokens, in the model's dtype, and its hidden states.
        """
        kv, logits, hidden = self.model.forward(kv, replace(batch, input_ids=_select(self.input_token_ids, 0, batch.input_ids)))
        return kv, _select(logits, 1, self.output_columns), hidden


@dataclass(frozen=True, eq=False)
class JaxSharedVocabulary(SharedVocabulary):
    """The same over a model that is a pytree of JAX, and so a pytree itself: its weights are no constants of a program."""


jax.tree_util.register_dataclass(
    JaxSharedVocabulary, data_fields=["model", "input_token_ids", "output_columns", "output_token_ids"], meta_fields=[]
)


def match_vocabularies(target_tokens: Mapping[str, int], draft_tokens: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens that two vocabularies share.

    Tokens are compared as they are spelt. Tokenizers of different kinds spell a space in different ways, such as "Ġ" and "▁", and name
    the end of a text differently: rename such tokens in one of the two first.

    Args:
        target_tokens: id of each token of the target, such as a tokenizer's `get_vocab()`.
        draft_tokens: the same of the draft.

    Returns:
        ids of the shared tokens in the target and in the draft, paired: [N] int32 each, ascending by target id.

    Raises:
        ArgumentTypeError: what is no mapping of strings to ints.
        ArgumentError: negative or huge ids, two tokens of one id, or no token that both have.

    Example:
        >>> target_ids, draft_ids = match_vocabularies({"c": 2, "b": 1, "a": 0}, {"c": 0, "a": 1, "?": 2})
        >>> target_ids.tolist(), draft_ids.tolist()
        ([0, 2], [1, 0])
    """
    _check_tokens("target_tokens", target_tokens)
    _check_tokens("draft_tokens", draft_tokens)
    pairs = sorted((number, draft_tokens[token]) for token, number in target_tokens.items() if token in draft_tokens)
    if not pairs:
        found = f"none among {len(target_tokens)} of the target and {len(draft_tokens)} of the draft"
        refuse("draft_tokens", "at least one token that the target has too", found, "spell the tokens of both in the same way")
    target_ids, draft_ids = np.ascontiguousarray(np.array(pairs, np.int32).T)
    return target_ids, draft_ids


def shared_vocabulary(
    model: Model, target_ids: Array, draft_ids: Array, target_vocab_size: int, unknown_id: int
) -> tuple[SharedVocabulary, Array]:
    """Make a draft of a language model with another tokenizer, by token-level intersection.

    The draft reads target ids: each shared token by the model's own id, any other as `unknown_id`. Its logits are those of the shared
    tokens alone, so what it drafts comes from an exactly known distribution over target ids, and output is lossless under every rule.
    Only what is kept depends on how much the two vocabularies share.

    Args:
        model: a language model of torch or of JAX.
        target_ids: [N] int32 distinct target ids of the shared tokens: an array of NumPy, torch or JAX, such as `match_vocabularies`
            returns. For a torch model that does not say its `device`, the tables are made where this is.
        draft_ids: [N] int32 distinct ids of the same tokens in the model. If it has fewer outputs than inputs, tokens without an output
            are read, but not drafted.
        target_vocab_size: number of target ids; at least the target's `vocab_size`.
        unknown_id: id of the model that stands for all tokens which it does not have, such as that of its token for unknown text.

    Returns:
        the draft, and its token_ids [N] int32: the target id of each output. Pass both to `funcspec.drafters.standalone`.

    Raises:
        ArgumentTypeError: what is no model, no int or no one-dimensional int32 array.
        ArgumentError: ids out of range, not distinct, not paired, or none; or none with an output.
        ModelError: the model reads hidden states of a target.

    Example:
        >>> import funcspec as fs
        >>> ids = fs.models.match_vocabularies({"a": 0, "b": 1, "c": 2}, {"c": 0, "a": 1, "?": 2})
        >>> draft = fs.models.TableModel(((0.2, 0.3, 0.5), (0.5, 0.25, 0.25), (1.0, 0.0, 0.0)))
        >>> model, token_ids = shared_vocabulary(draft, *ids, target_vocab_size=3, unknown_id=2)
        >>> model.vocab_size, model.input_vocab_size, token_ids.tolist(), model.input_token_ids.tolist()
        (2, 3, [0, 2], [1, 2, 0])
        >>> drafter = fs.drafters.standalone(model, token_ids)

    Reference: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
    Vocabularies", arXiv 2502.05202, where it is called TLI.
    """
    _check_model(model)
    check_int("target_vocab_size", target_vocab_size, 1)
    check_int("unknown_id", unknown_id, 0)
    readable: int = getattr(model, "input_vocab_size", model.vocab_size)
    sizes = f"{target_vocab_size} tokens of the target and {readable} of the draft"
    if unknown_id >= readable:
        refuse("unknown_id", f"an id of the draft, from 0 to {readable - 1}, for {sizes}", unknown_id, "pass an id that the draft can read")
    targets = _checked_ids("target_ids", target_ids, target_vocab_size, sizes)
    drafts = _checked_ids("draft_ids", draft_ids, readable, sizes)
    if len(targets) != len(drafts):
        refuse("draft_ids", f"{len(targets)} ids, one for each of target_ids", len(drafts), "pass what match_vocabularies returned")
    columns = _output_columns(model, readable)[drafts]
    drafted = columns >= 0
    if not drafted.any():
        found = f"none of {len(drafts)} among its {model.vocab_size} outputs"
        refuse("draft_ids", f"a token that the draft has an output for, of {sizes}", found, "use a draft with more outputs")
    table = np.full(target_vocab_size, unknown_id, np.int32)
    table[targets] = drafts
    input_ids, kept, token_ids = (_placed(array, model, target_ids) for array in (table, columns[drafted], targets[drafted]))
    # A model that is no pytree cannot be an argument of a program, nor can what holds it.
    kind = SharedVocabulary if jax.tree_util.all_leaves([model]) else JaxSharedVocabulary
    return kind(model, input_ids, kept, token_ids), token_ids


def _select(array: Array, axis: int, indices: Array) -> Array:
    """Entries of an array of either framework along an axis; indices are in range."""
    if isinstance(array, torch.Tensor):
        return array.index_select(axis, indices)
    return jnp.take(array, indices, axis=axis, mode="clip")


def _placed(array: np.ndarray, model: Model, like: Array) -> Array:
    """An array of the model's framework, where the model is."""
    if getattr(model, "framework", "torch") == "jax":
        return jnp.asarray(array)
    device = getattr(model, "device", None)
    if device is None:
        device = like.device if isinstance(like, torch.Tensor) else "cpu"
    return torch.from_numpy(array).to(device)


def _output_columns(model: Model, readable: int) -> np.ndarray:
    """[readable] int32, the column of the logits for each id that can be fed, -1 where there is none."""
    outputs: Any = getattr(model, "output_token_ids", None)
    found = np.arange(min(model.vocab_size, readable)) if outputs is None else _on_host(outputs)
    columns = np.full(readable, -1, np.int32)
    columns[found] = np.arange(len(found), dtype=np.int32)
    return columns


def _on_host(array: Array) -> np.ndarray:
    return np.asarray(array.cpu() if isinstance(array, torch.Tensor) else array)


def _check_tokens(argument: str, tokens: object) -> None:
    """Refuse what is no vocabulary."""
    if not isinstance(tokens, Mapping):
        refuse(argument, "a mapping of tokens to ids", type_name(tokens), "pass the tokenizer's get_vocab()", ArgumentTypeError)
    for token, number in tokens.items():
        if not isinstance(token, str) or not isinstance(number, int) or isinstance(number, bool):
            found = f"{token!r:.60}: {number!r:.60}"
            refuse(argument, "a mapping of strings to ints", found, "pass the tokenizer's get_vocab()", ArgumentTypeError)
        if not 0 <= number <= LARGEST_ID:
            refuse(argument, f"ids from 0 to {LARGEST_ID}", f"{number} for {token!r:.60}", "leave the token out")
    if (distinct := len(set(tokens.values()))) != len(tokens):
        refuse(argument, "one token for each id", f"{distinct} ids for {len(tokens)} tokens", "leave out the other spellings")


def _check_model(model: object) -> None:
    """Refuse what is no language model."""
    if not isinstance(model, Model) or isinstance(model, type):
        fix = "wrap it with a function of funcspec.models"
        refuse("model", "a Model (vocab_size, max_len, kv_spec, forward)", type_name(model), fix, ArgumentTypeError)
    if getattr(model, "features", None) is not None:
        fix = "such a draft serves the one target it was trained with, whose ids it reads"
        refuse("model", "a language model", "a draft that reads hidden states", fix, ModelError)


def _checked_ids(argument: str, ids: Array, count: int, sizes: str) -> np.ndarray:
    """Refuse what are no distinct ids below `count`, at least one; return them on the host."""
    is_array = isinstance(ids, np.ndarray | torch.Tensor | jax.Array)
    if not is_array or str(ids.dtype).removeprefix("torch.") != "int32" or ids.ndim != 1:
        found = f"{list(ids.shape)} {ids.dtype}" if is_array else type_name(ids)
        refuse(argument, "a one-dimensional int32 array", found, "pass what match_vocabularies returned", ArgumentTypeError)
    found = _on_host(ids)
    if len(found) == 0:
        refuse(argument, f"at least one id, for {sizes}", "none", "use a draft that shares tokens with the target")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= count:
        expected = f"ids from 0 to {count - 1}, for {sizes}"
        refuse(argument, expected, f"ids from {low} to {high}", "pass the vocabularies of this pair of models")
    if (distinct := len(np.unique(found))) != len(found):
        refuse(argument, f"distinct ids, for {sizes}", f"{distinct} distinct of {len(found)}", "pair every token once")
    return found


__all__ = ["JaxSharedVocabulary", "SharedVocabulary", "match_vocabularies", "shared_vocabulary"]
