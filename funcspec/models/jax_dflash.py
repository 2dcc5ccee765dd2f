"""The model of `funcspec.models.dflash` in JAX, over the same paged cache: a pytree of weights and a pure `forward`."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from funcspec.models.base import KV, FeatureSpec, ForwardBatch
from funcspec.models.dflash import DFlash, DFlashConfig, block_of, check_dflash
from funcspec.models.jax_llama import JaxLlamaLayers, Layout, mix_values, multiply, write_cache


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class JaxDFlash(JaxLlamaLayers):
    """A DFlash model as a `Model` of JAX; see `DFlash`. It is a pytree like `JaxLlama`.

    Attributes:
        config: its shape, and what it reads; static in a pytree.
        weights: arrays by name, as `DFlashConfig.weight_shapes` lists them, and perhaps "head".
        output_token_ids, framework: as for `JaxLlama`.

    Example:
        >>> from funcspec.models.dflash import random_dflash
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> model = JaxDFlash.from_torch(random_dflash(DFlashConfig(**shape, head_dim=4, max_len=16, target_layers=(1, 2))))
        >>> model.features.size
        16
    """

    config: DFlashConfig

    def __post_init__(self) -> None:
        check_dflash(self.config, self.weights)
        super().__post_init__()

    @classmethod
    def from_torch(cls, model: DFlash) -> "JaxDFlash":
        """Make the same model of the weights of a torch one; shared as by `JaxLlama.from_torch`.

        Args:
            model: of any dtype.

        Raises:
            ModelError: JAX has no such device.
        """
        return cls._from_torch(model)

    @property
    def features(self) -> FeatureSpec:
        """What it reads of the target."""
        return self.config.features

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[dict[str, jax.Array], jax.Array, tuple[jax.Array, ...]]:
        """Run a batch; see `DFlash.forward`, and `JaxLlama.forward` on donation.

        Args:
            kv: "key" and "value", [num_layers, num_blocks, block_size, num_kv_heads, head_dim].
            batch: what to run. Ids, positions, slots and blocks out of range are not found out.

        Returns:
            the new kv, logits [M, vocab_size] in the weights' dtype, and nothing else.

        Raises:
            ModelError: features are missing or do not fit, the window is another, or `kv` does not fit `kv_spec`.
            ArgumentError: arrays of the batch do not fit each other.
        """
        block = block_of(self.config, batch, jnp.arange(batch.input_ids.shape[0], dtype=jnp.int32))
        new = self._write_context(jnp.asarray(batch.features, self.dtype), batch.positions[block.context], block.slots, kv)
        if block.width == 0:
            return new, jnp.zeros((0, self.vocab_size), self.dtype), ()
        rows, places = batch.seq_lens.shape[0], block.queries
        of_block = replace(
            batch,
            input_ids=batch.input_ids[places],
            positions=batch.positions[places],
            slot_mapping=batch.slot_mapping[places],
            query_start_loc=jnp.arange(0, (rows + 1) * block.width, block.width, dtype=batch.query_start_loc.dtype),
            logits_indices=None,
            max_query_len=block.width,
            features=None,
        )
        padded = self._padded(kv, of_block)
        new, kept = self._run_layers(self._embedded(padded), new, padded)
        chosen = kept[-1][: rows * block.width].reshape(rows, block.width, -1)[:, block.width - block.choices :]
        logits = multiply(self._normalise(chosen.reshape(rows * block.choices, -1), "norm"), self._head)
        return new, logits, ()

    def _write_context(self, features: jax.Array, positions: jax.Array, slots: jax.Array, kv: KV) -> dict[str, jax.Array]:
        """Turn features [T, F] into keys and values of all layers."""
        config, new, count = self.config, dict(kv), features.shape[0]
        context = self._normalise(multiply(features, self.weights["fc"]), "feature_norm")
        rotary = tuple(jnp.take(table, positions, axis=0, mode="clip") for table in self._rotary)
        end = kv["key"].shape[1] * kv["key"].shape[2]
        slots = jnp.where(slots < 0, end + jnp.arange(count), slots)  # all different, as a write of unique indices wants it
        for layer in range(config.num_layers):
            parts = multiply(context, self.weights[f"{layer}.qkv"][config.num_heads * config.head_dim :])
            key, value = jnp.split(parts.reshape(count, 2 * config.num_kv_heads, config.head_dim), 2, axis=1)
            new["key"] = write_cache(new["key"], layer, slots, self._turn(key, f"{layer}.key_norm", rotary))
            new["value"] = write_cache(new["value"], layer, slots, value)
        return new

    def _turn(self, x: jax.Array, name: str, rotary: tuple[jax.Array, ...]) -> jax.Array:
        """Normalise the heads of x [T, heads, head_dim], if there is a norm of this name, and rotate them."""
        x = self._normalise(x, name)
        return (x * rotary[0] + jnp.roll(x, self.config.head_dim // 2, 2) * rotary[1]).astype(self.dtype)

    def _attend(
        self, layer: int, read: jax.Array, kv: dict[str, jax.Array], layout: Layout, rotary: tuple[jax.Array, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Attention of one layer over the block: every query sees all keys of its row, those of later places too."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = multiply(read, self.weights[f"{layer}.qkv"]).reshape(-1, heads + 2 * kv_heads, self.config.head_dim)
        query, key, value = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
        kv["key"] = write_cache(kv["key"], layer, layout.slots, self._turn(key, f"{layer}.key_norm", rotary))
        kv["value"] = write_cache(kv["value"], layer, layout.slots, value)
        # A row's last query sees all of its keys; the others look on from there.
        both_ways = layout._replace(visible=jnp.broadcast_to(layout.visible.any(1, keepdims=True), layout.visible.shape))
        mixed = mix_values(self._turn(query, f"{layer}.query_norm", rotary), kv["key"][layer], kv["value"][layer], both_ways)
        return kv, multiply(mixed.astype(read.dtype), self.weights[f"{layer}.attention_output"])


__all__ = ["JaxDFlash"]
