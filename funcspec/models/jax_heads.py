"""The heads of `funcspec.models.heads` in JAX, over the same paged cache: a pytree of weights and a pure `forward`."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from funcspec.models.base import KV, FeatureSpec, ForwardBatch
from funcspec.models.heads import EagleConfig, EagleHead, ModuleStack, check_head, fed_features
from funcspec.models.jax_llama import JaxLlamaLayers, count_logits, multiply, pad


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class JaxEagleHead(JaxLlamaLayers):
    """A head as a `Model` of JAX; see `EagleHead`. It is a pytree like `JaxLlama`.

    Attributes:
        config: its shape, and how it reads; static in a pytree.
        weights: arrays by name, as `EagleConfig.weight_shapes` lists them, and perhaps "head".
        output_token_ids, framework: as for `JaxLlama`.

    Example:
        >>> from funcspec.models.heads import random_head
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> head = JaxEagleHead.from_torch(random_head(EagleConfig(**shape, head_dim=4, max_len=16, target_layers=(2,))))
        >>> head.features.feedback
        8
    """

    config: EagleConfig

    def __post_init__(self) -> None:
        check_head(self.config, self.weights)
        super().__post_init__()

    @classmethod
    def from_torch(cls, head: EagleHead) -> "JaxEagleHead":
        """Make the same head of the weights of a torch one; shared as by `JaxLlama.from_torch`.

        Args:
            head: a head of any dtype.

        Raises:
            ModelError: JAX has no such device.
        """
        return cls._from_torch(head)

    @property
    def features(self) -> FeatureSpec:
        """What it reads of the target."""
        return self.config.features

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[dict[str, jax.Array], jax.Array, tuple[jax.Array, ...]]:
        """Run a batch; see `EagleHead.forward`, and `JaxLlama.forward` on donation.

        Args:
            kv: "key" and "value", [num_layers, num_blocks, block_size, num_kv_heads, head_dim].
            batch: what to run. Ids, positions, slots and blocks out of range are not found out.

        Returns:
            the new kv, logits [M, vocab_size] in the weights' dtype, and one state [M, hidden_size] to hand on.

        Raises:
            ModelError: features are missing or do not fit, hidden states are wanted, or `kv` does not fit `kv_spec`.
            ArgumentError: arrays of the batch do not fit each other.
        """
        new, x = self.run(kv, batch)
        return new, *self.answer(x, batch)

    def run(self, kv: KV, batch: ForwardBatch) -> tuple[dict[str, jax.Array], jax.Array]:
        """The new kv, and what the layers leave at each place, [T, hidden_size] or a few rows more."""
        fed_features(self.config, batch)
        padded = self._padded(kv, batch)
        x, first_input = self._read(self._embedded(padded), jnp.asarray(padded.features, self.dtype))
        new, kept = self._run_layers(x, kv, padded, first_input)
        return new, kept[-1]

    def answer(self, x: jax.Array, batch: ForwardBatch) -> tuple[jax.Array, tuple[jax.Array]]:
        """Logits and states, where the batch wants logits, of what `run` returned."""
        chosen, count = self._chosen(x, pad(batch)), count_logits(batch)
        state = self.handed_on(chosen)
        last = state if self.config.feedback == "normalised" else self._normalise(chosen, "norm")
        return multiply(last, self._head)[:count], (state[:count],)

    def handed_on(self, x: jax.Array) -> jax.Array:
        """States of some of what `run` returned."""
        return self._normalise(x, "norm") if self.config.feedback == "normalised" else x

    def _read(self, embedded: jax.Array, features: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """What enters the layers, and what the first attention reads if that is not the same normalised."""
        embedded, weight = self._normalise(embedded, "embed_norm"), self.weights["fc"]
        if self.config.style == "eagle3":
            x = features if features.shape[1] == self.config.hidden_size else multiply(features, weight)
            return x, jnp.concatenate([embedded, self._normalise(x, "feature_norm")], 1)
        x = multiply(jnp.concatenate([embedded, self._normalise(features, "feature_norm")], 1), weight)
        return x + self.weights["fc_bias"] if self.config.fc_bias else x, None


@dataclass(frozen=True, eq=False)
class JaxMtpModules(ModuleStack):
    """Modules for multi-token prediction as a `Model` of JAX; see `MtpModules`. A pytree of its modules.

    Attributes:
        modules: heads of one configuration, in the order of the drafts.
        depth: which module answers; static in a pytree.
        framework: "jax".
    """

    modules: tuple[JaxEagleHead, ...]
    kind: ClassVar[type] = JaxEagleHead
    framework: ClassVar[str] = "jax"

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[dict[str, jax.Array], jax.Array, tuple[jax.Array, ...]]:
        """Run a batch; see `MtpModules.forward`.

        Args:
            kv: the entries of `kv_spec`.
            batch: what to run: at depth 0 committed tokens, else one place a row with what the module before handed on.

        Returns:
            the new kv, logits [M, vocab_size] and one state [M, hidden_size] to hand on, of the module at this depth.

        Raises:
            ModelError, ArgumentError: as for `JaxEagleHead.forward`.
        """
        new, x = self._run(dict(kv), batch, self.depth)
        answer = self.modules[self.depth].answer(x, batch)
        for depth in self._later():
            states = self.modules[depth - 1].handed_on(x[: batch.input_ids.shape[0]])
            new, earlier = self._moved(new, batch, depth, states)
            new, x = self._run(new, replace(batch, features=earlier), depth)
        return new, *answer

    def _run(self, kv: dict[str, jax.Array], batch: ForwardBatch, depth: int) -> tuple[dict[str, jax.Array], jax.Array]:
        """Run one module on its part of the cache: all of the new kv, and what the module's layers leave."""
        part = self._layers(depth)
        own = {name: kv[name][part] for name in ("key", "value")}
        if depth > 0:  # in blocks of one place each, single places can be left out of the tables
            size, blocks = kv["key"].shape[2], batch.block_tables[:, :, None]
            tables = jnp.where(blocks < 0, -1, blocks * size + jnp.arange(size)).reshape(len(blocks), -1)
            batch = replace(batch, block_tables=jnp.where(jnp.arange(tables.shape[1]) < depth, -1, tables))
            own = {name: cache.reshape(cache.shape[0], -1, 1, *cache.shape[3:]) for name, cache in own.items()}
        new, x = self.modules[depth].run(own, batch)
        return kv | {name: kv[name].at[part].set(cache.reshape(kv[name][part].shape)) for name, cache in new.items()}, x

    def _moved(
        self, kv: dict[str, jax.Array], batch: ForwardBatch, depth: int, states: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """The kv with the states of the module before this one, and those of one place earlier."""
        layers, blocks, size, width = kv["state"].shape
        layer, by_slot = self._layers(depth - 1).start, kv["state"].reshape(layers, blocks * size, width)
        to = jnp.where(batch.slot_mapping < 0, blocks * size, batch.slot_mapping)
        by_slot = by_slot.at[layer, to].set(states.astype(by_slot.dtype), mode="drop")
        places, last = jnp.arange(batch.input_ids.shape[0]), batch.seq_lens.shape[0] - 1
        rows = jnp.minimum(jnp.searchsorted(batch.query_start_loc[1:], places, side="right", method="compare_all"), last)
        earlier = jnp.maximum(batch.positions - 1, 0)
        slots = jnp.maximum(batch.block_tables[rows, earlier // size], 0) * size + earlier % size
        return kv | {"state": by_slot.reshape(kv["state"].shape)}, by_slot[layer, slots]


def _unflatten(depth: int, modules: tuple[Any, ...]) -> JaxMtpModules:
    """Put modules together unchecked: JAX passes placeholders."""
    stack = object.__new__(JaxMtpModules)
    object.__setattr__(stack, "modules", tuple(modules))
    object.__setattr__(stack, "depth", depth)
    return stack


jax.tree_util.register_pytree_node(JaxMtpModules, lambda stack: (stack.modules, stack.depth), _unflatten)

__all__ = ["JaxEagleHead", "JaxMtpModules"]
