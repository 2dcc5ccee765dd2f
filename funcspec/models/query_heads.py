"""Query-only heads: layers that attend to the target's own cache, with queries of their own and no keys and values.

In torch (`QueryHead`) and in JAX (`JaxQueryHead`); `funcspec.drafters.mtp` makes a drafter of them.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import torch

from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.attention import Rotary, attend, rotate
from funcspec.models.base import KV, FeatureSpec, ForwardBatch, KVEntry, KVSpec
from funcspec.models.heads import EagleConfig, EagleHead
from funcspec.models.jax_heads import JaxEagleHead
from funcspec.models.jax_llama import Layout, mix_values, multiply
from funcspec.models.llama import random_weights


@dataclass(frozen=True, kw_only=True)
class QueryConfig(EagleConfig):
    """Shape of a query-only head: that of an EAGLE head of any style, usually "mtp", without keys and values.

    Attributes:
        vocab_size, num_layers, hidden_size, intermediate_size, num_heads, max_len, norm_eps, target_layers, style, embed_norm,
            feature_norm, outer_norms, fc_bias, feedback: as for `EagleConfig`.
        num_kv_heads, head_dim, rope_theta: those of the target.
        cache_layers: for each layer of the head, which layer of the target's cache its attention reads.

    Example:
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> config = QueryConfig(**shape, head_dim=4, max_len=16, target_layers=(2,), style="mtp", cache_layers=(1,))
        >>> config.weight_shapes()["0.query"]
        (8, 8)
    """

    cache_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.cache_layers
        if not isinstance(layers, tuple) or len(layers) != self.num_layers:
            refuse("cache_layers", f"a tuple of {self.num_layers}, one for each layer", repr(layers), "name one for each", ModelError)

    @property
    def features(self) -> FeatureSpec:
        """What the head reads of the target."""
        return replace(super().features, cache_layers=self.cache_layers)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights but the optional "head"; matrices are [output, input]."""
        shapes = super().weight_shapes()
        for layer in range(self.num_layers):
            shapes[f"{layer}.query"] = (self.num_heads * self.head_dim, shapes.pop(f"{layer}.qkv")[1])
        return shapes


def check_query(config: object) -> None:
    """Refuse another configuration.

    Raises:
        ArgumentTypeError: no `QueryConfig`.
    """
    if not isinstance(config, QueryConfig):
        refuse("config", "a QueryConfig", type(config).__name__, "use EagleHead for a head with a cache of its own", ArgumentTypeError)


@dataclass(frozen=True, eq=False)
class QueryHead(EagleHead):
    """A query-only head as a `Model` that reads hidden states and the cache of a target; see `funcspec.drafters.mtp`.

    In the first pass of a round it reads the target's hidden state of position x and the token of x + 1, and foresees the token of x + 2.
    In later passes it reads what it handed on itself and the newest draft, still at position x: the target's cache ends there.

    Attributes:
        config: its shape, and how it reads.
        weights: tensors by name, as `QueryConfig.weight_shapes` lists them, all of one dtype, that of the target, and device. "embed" may
            be the target's; a "head", perhaps the target's too, replaces the embedding as the output matrix.
        output_token_ids: as for `Llama`.

    Example:
        >>> import funcspec as fs
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> config = QueryConfig(**shape, head_dim=4, max_len=16, target_layers=(2,), style="mtp", cache_layers=(1,))
        >>> drafter = fs.drafters.mtp(random_query_head(config))

    Reference: heads of this kind come with Gemma 4; see also Zimmer et al. 2024, "Mixture of attentions for speculative decoding",
    arXiv 2410.03804.
    """

    config: QueryConfig

    def __post_init__(self) -> None:
        check_query(self.config)
        super().__post_init__()

    @property
    def cache_entries(self) -> tuple[KVEntry, ...]:
        """What the layers of the target's cache have to hold."""
        return super().kv_spec.entries

    @property
    def kv_spec(self) -> KVSpec:
        """Nothing is cached."""
        return KVSpec(0, ())

    def _attend(self, layer: int, read: torch.Tensor, kv: KV, batch: ForwardBatch, rotary: Rotary, mixed: torch.Tensor) -> torch.Tensor:
        """Attention of one layer to a layer of the target's cache."""
        query = self._products[f"{layer}.query"](read)[: batch.input_ids.shape[0]].unflatten(1, mixed.shape[1:])
        attend(rotate(query, rotary), kv, self.config.cache_layers[layer], batch, mixed)
        return self._products[f"{layer}.attention_output"](mixed.flatten(1))


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class JaxQueryHead(JaxEagleHead):
    """A query-only head as a `Model` of JAX; see `QueryHead`. It is a pytree like `JaxLlama`.

    Attributes:
        config: its shape, and how it reads; static in a pytree.
        weights: arrays by name, as `QueryConfig.weight_shapes` lists them, and perhaps "head".
        output_token_ids, framework: as for `JaxLlama`.
    """

    config: QueryConfig

    def __post_init__(self) -> None:
        check_query(self.config)
        super().__post_init__()

    @classmethod
    def from_torch(cls, head: EagleHead) -> "JaxQueryHead":
        """Make the same head of the weights of a torch one; shared as by `JaxLlama.from_torch`.

        Args:
            head: a `QueryHead` of any dtype.

        Raises:
            ArgumentTypeError: another kind of head.
            ModelError: JAX has no such device.
        """
        return cls._from_torch(head)

    @property
    def cache_entries(self) -> tuple[KVEntry, ...]:
        """What the layers of the target's cache have to hold."""
        return super().kv_spec.entries

    @property
    def kv_spec(self) -> KVSpec:
        """Nothing is cached."""
        return KVSpec(0, ())

    def _attend(
        self, layer: int, read: jax.Array, kv: dict[str, jax.Array], layout: Layout, rotary: tuple[jax.Array, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Attention of one layer to a layer of the target's cache, which stays as it is."""
        config, source = self.config, self.config.cache_layers[layer]
        query = multiply(read, self.weights[f"{layer}.query"]).reshape(-1, config.num_heads, config.head_dim)
        query = (query * rotary[0] + jnp.roll(query, config.head_dim // 2, 2) * rotary[1]).astype(read.dtype)
        mixed = mix_values(query, kv["key"][source], kv["value"][source], layout)
        return kv, multiply(mixed.astype(read.dtype), self.weights[f"{layer}.attention_output"])


def random_query_head(
    config: QueryConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> QueryHead:
    """A head with random weights, for tests: the same for the same seed.

    Args:
        config: shape.
        seed: of the weights.
        dtype: of weights, the target's cache and logits.
        device: where to put the weights.
    """
    return QueryHead(config, random_weights(config, seed, dtype, device))


__all__ = ["JaxQueryHead", "QueryConfig", "QueryHead", "check_query", "random_query_head"]
