"""P-EAGLE: EAGLE heads that foresee several tokens in one pass, with a learned feature where the target has no hidden state yet.

In torch (`ParallelHead`) and in JAX (`JaxParallelHead`); `funcspec.drafters.parallel` makes a drafter of them.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import torch

from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import KV, Array, FeatureSpec, ForwardBatch
from funcspec.models.heads import EagleConfig, EagleHead
from funcspec.models.jax_heads import JaxEagleHead
from funcspec.models.llama import random_weights


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(EagleConfig):
    """Shape of a P-EAGLE head: that of an EAGLE head of any style, of one pass a round; P-EAGLE as it was published has "eagle3".

    Attributes:
        vocab_size, num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, max_len, rope_theta, norm_eps,
            target_layers, style, embed_norm, feature_norm, outer_norms, fc_bias: as for `EagleConfig`. Nothing is handed on, so
            `feedback` does not matter.

    Example:
        >>> shape = {"vocab_size": 5, "num_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> config = ParallelConfig(**shape, head_dim=4, max_len=16, target_layers=(0, 1, 2), style="eagle3")
        >>> config.weight_shapes()["mask_feature"]
        (24,)
    """

    @property
    def features(self) -> FeatureSpec:
        """What the head reads of the target."""
        return replace(super().features, feedback=0)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights but the optional "head"; matrices are [output, input]."""
        return {**super().weight_shapes(), "mask_feature": (self.features.size,)}


def check_parallel(config: object) -> None:
    """Refuse another configuration.

    Raises:
        ArgumentTypeError: no `ParallelConfig`.
    """
    if not isinstance(config, ParallelConfig):
        refuse("config", "a ParallelConfig", type(config).__name__, "use EagleHead for a head that is run step by step", ArgumentTypeError)


def mask_places(config: ParallelConfig, batch: ForwardBatch, lanes: Array) -> tuple[Array, Array] | None:
    """Which features a window's places have, and where they have the learned one instead.

    The first wanted place of a row is that of its newest token; whatever lies behind it is a mask, or nothing.

    Args:
        config: shape of the head.
        batch: of either framework, with features of the first P of each row's W places.
        lanes: [T] int32, 0, 1, ...: as many numbers as the batch has places.

    Returns:
        indices [W] into a row's features, and [R, W, 1] whether the place is behind the newest token; None where every place has features.

    Raises:
        ModelError: features are missing or do not fit, or logits are wanted of other places.
    """
    rows, places, size = batch.seq_lens.shape[0], batch.input_ids.shape[0], config.features.size
    held = 0 if batch.features is None else batch.features.shape[0]
    masks, choices = (places - held) // rows, 0 if batch.logits_indices is None else batch.logits_indices.shape[0] // rows
    fits = batch.features is not None and batch.features.shape[1] == size and held % rows == places % rows == 0 and masks >= 0
    if not fits or (masks and not choices):
        expected = f"features [R * P, {size}] for windows of at least P places, and wanted places where there are more"
        found = f"{None if batch.features is None else tuple(batch.features.shape)} for {places} places of {rows} rows, {choices} wanted"
        refuse("batch", expected, found, "draft with funcspec.drafters.parallel", ModelError)
    if masks == 0:
        return None
    assert batch.logits_indices is not None
    lanes = lanes[: places // rows]
    newest = batch.logits_indices[::choices] - batch.query_start_loc[:-1]
    return lanes.clip(max=held // rows - 1), (lanes > newest[:, None])[:, :, None]


@dataclass(frozen=True, eq=False)
class ParallelHead(EagleHead):
    """A P-EAGLE head as a `Model` that reads hidden states of a target; a drafter is made of it with `funcspec.drafters.parallel`.

    At position x it reads the target's hidden state of x and the token of x + 1, and foresees the token of x + 2. At the mask places behind
    the newest token it reads "mask_feature" and the mask token, and foresees the tokens after that.

    Attributes:
        config: its shape, and how it reads.
        weights: tensors by name, as `ParallelConfig.weight_shapes` lists them, all of one dtype and device. "mask_feature" has the width of
            the features. "embed" may be the target's; a "head", perhaps the target's too, replaces the embedding as the output matrix.
        output_token_ids: as for `Llama`.

    Example:
        >>> import funcspec as fs
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> head = random_parallel_head(ParallelConfig(**shape, head_dim=4, max_len=16, target_layers=(1, 2), style="eagle3"))
        >>> drafter = fs.drafters.parallel(head, mask_id=4)

    Reference: "P-EAGLE", 2026, arXiv 2602.01469.
    """

    config: ParallelConfig

    def __post_init__(self) -> None:
        check_parallel(self.config)
        super().__post_init__()

    @torch.no_grad()
    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run a batch; see `Model.forward`.

        Args:
            kv: "key" and "value", [num_layers, num_blocks, block_size, num_kv_heads, head_dim], written in place.
            batch: what to run: at each position the token of the next one, with features [R * P, features.size] of the first P places of
                each row. If a row has more places, the first wanted one is that of its newest token, and masks follow.

        Returns:
            kv, logits [M, vocab_size] in the weights' dtype, and nothing else.

        Raises:
            ModelError: features are missing or do not fit, or hidden states are wanted.
        """
        lanes = torch.arange(batch.input_ids.shape[0], dtype=torch.int32, device=batch.input_ids.device)
        found, features = mask_places(self.config, batch, lanes), batch.features
        if found is not None:
            assert features is not None
            taken, behind = found
            known = features.unflatten(0, (len(behind), -1))[:, taken]
            features = torch.where(behind, self.weights["mask_feature"].float(), known).flatten(0, 1)
        kv, logits, _ = super().forward(kv, replace(batch, features=features))
        return kv, logits, ()


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class JaxParallelHead(JaxEagleHead):
    """A P-EAGLE head as a `Model` of JAX; see `ParallelHead`. It is a pytree like `JaxLlama`.

    Attributes:
        config: its shape, and how it reads; static in a pytree.
        weights: arrays by name, as `ParallelConfig.weight_shapes` lists them, and perhaps "head".
        output_token_ids, framework: as for `JaxLlama`.
    """

    config: ParallelConfig

    def __post_init__(self) -> None:
        check_parallel(self.config)
        super().__post_init__()

    @classmethod
    def from_torch(cls, head: EagleHead) -> "JaxParallelHead":
        """Make the same head of the weights of a torch one; shared as by `JaxLlama.from_torch`.

        Args:
            head: a `ParallelHead` of any dtype.

        Raises:
            ArgumentTypeError: another kind of head.
            ModelError: JAX has no such device.
        """
        return cls._from_torch(head)

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[dict[str, jax.Array], jax.Array, tuple[jax.Array, ...]]:
        """Run a batch; see `ParallelHead.forward`, and `JaxLlama.forward` on donation."""
        found, features = mask_places(self.config, batch, jnp.arange(batch.input_ids.shape[0], dtype=jnp.int32)), batch.features
        if found is not None:
            assert features is not None
            taken, behind = found
            known = features.reshape(len(behind), -1, features.shape[1])[:, taken]
            features = jnp.where(behind, self.weights["mask_feature"].astype(jnp.float32), known)
            features = features.reshape(batch.input_ids.shape[0], -1)
        kv, logits, _ = super().forward(kv, replace(batch, features=features))
        return dict(kv), logits, ()


def random_parallel_head(
    config: ParallelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> ParallelHead:
    """A head with random weights, for tests: the same for the same seed.

    Args:
        config: shape.
        seed: of the weights.
        dtype: of weights, cache and logits.
        device: where to put the weights.
    """
    return ParallelHead(config, random_weights(config, seed, dtype, device))


__all__ = ["JaxParallelHead", "ParallelConfig", "ParallelHead", "check_parallel", "mask_places", "random_parallel_head"]
