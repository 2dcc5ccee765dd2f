"""Draft heads over a target's hidden states, with a paged cache of their own: EAGLE, EAGLE-3, modules for multi-token prediction."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch.nn import functional as F

from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.kernels.kv_cache import write_kv_
from funcspec.models.base import KV, Array, FeatureSpec, ForwardBatch, KVEntry, KVSpec
from funcspec.models.llama import LlamaConfig, LlamaLayers, random_weights

Style = Literal["eagle", "eagle3", "mtp"]
Feedback = Literal["normalised", "raw"]

_PUBLISHED = {"embed_norm": True, "feature_norm": True, "outer_norms": True, "fc_bias": False, "feedback": "raw"}
"""What EAGLE-3 and multi-token prediction have; with "eagle" one may choose."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LlamaConfig):
    """Shape of a head: that of its layers, which have the target's hidden size, and how they read the target.

    Three styles, in which x is the residual stream that enters the layers:

    * "eagle": x = fc(cat(embedding, feature)), a feature being one hidden state of the target. The switches below apply.
    * "mtp", a module for multi-token prediction: the same with both norms and raw feedback.
    * "eagle3": x = fc(features of several layers of the target) in the first pass of a round, later what the head handed on as it is;
      the attention of the first layer reads cat(norm(embedding), norm(x)), of twice the width. Raw feedback.

    Attributes:
        vocab_size, num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, max_len, rope_theta, norm_eps: as for
            `LlamaConfig`.
        target_layers: hidden states of the target that it reads, numbered as in `Llama.forward`: one, or for "eagle3" two or more.
        style: "eagle", "eagle3" or "mtp".
        embed_norm, feature_norm: whether embedding and feature are normalised first; by default no with "eagle", yes with the others.
        outer_norms: whether the first layer normalises what it reads, and the output matrix what it is applied to. EAGLE-1 and 2 as they
            were published have neither norm.
        fc_bias: whether a bias is added to what fc gives.
        residual_multiplier: width of the target's hidden states in hidden sizes, for targets that hand over several residual streams
            side by side; more than 1 with "eagle3" only.
        feedback: what the head hands to its own next pass: "normalised" is what the output matrix is applied to, "raw" the residual stream
            before that norm. By default the former with "eagle", the latter with the others.

    Example:
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> config = EagleConfig(**shape, head_dim=4, max_len=16, target_layers=(0, 1, 2), style="eagle3")
        >>> config.weight_shapes()["fc"]
        (8, 24)
    """

    target_layers: tuple[int, ...]
    style: Style = "eagle"
    embed_norm: bool | None = None
    feature_norm: bool | None = None
    outer_norms: bool = True
    fc_bias: bool = False
    feedback: Feedback | None = None
    residual_multiplier: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style not in ("eagle", "eagle3", "mtp"):
            refuse("style", "'eagle', 'eagle3' or 'mtp'", repr(self.style), "use one of these", ModelError)
        if self.num_layers < 1:
            refuse("num_layers", "at least 1", self.num_layers, "check the configuration", ModelError)
        if not isinstance(self.target_layers, tuple):
            refuse("target_layers", "a tuple of layer numbers", repr(self.target_layers), "write (number,)", ArgumentTypeError)
        count, streams = len(self.target_layers), self.residual_multiplier
        if not isinstance(streams, int) or streams < 1 or (streams > 1 and self.style != "eagle3"):
            refuse("residual_multiplier", "1, or more with 'eagle3'", repr(streams), "combine the streams with 'eagle3'", ModelError)
        if self.style == "eagle3" and count < 2:
            refuse("target_layers", "two or more with 'eagle3'", self.target_layers, "use the style 'eagle' for one", ModelError)
        if self.style != "eagle3" and count != 1:
            refuse("target_layers", f"one with {self.style!r}", self.target_layers, "use the style 'eagle3' for several", ModelError)
        usual = {"embed_norm": False, "feature_norm": False, "feedback": "normalised"} if self.style == "eagle" else _PUBLISHED
        for name, value in usual.items():
            found = getattr(self, name)
            if found is None:
                object.__setattr__(self, name, value)
            elif self.style != "eagle" and found != value:
                refuse(name, f"{value!r} with {self.style!r}", repr(found), "leave it out, or use the style 'eagle'", ModelError)
        if self.feedback not in ("normalised", "raw"):
            refuse("feedback", "'normalised' or 'raw'", repr(self.feedback), "use one of these", ModelError)

    @property
    def features(self) -> FeatureSpec:
        """What the head reads of the target."""
        size = len(self.target_layers) * self.hidden_size * self.residual_multiplier
        return FeatureSpec(self.target_layers, size, feedback=self.hidden_size)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights but the optional "head"; matrices are [output, input]."""
        shapes, size = super().weight_shapes(), self.hidden_size
        shapes["fc"] = (size, self.features.size if self.style == "eagle3" else 2 * size)
        if self.style == "eagle3":
            shapes["0.qkv"] = (shapes["0.qkv"][0], 2 * size)
        optional = {"fc_bias": self.fc_bias, "embed_norm": self.embed_norm, "feature_norm": self.feature_norm}
        shapes |= {name: (size,) for name, wanted in optional.items() if wanted}
        absent = ("0.attention_norm",) * (self.style == "eagle3") + ("0.attention_norm", "norm") * (not self.outer_norms)
        return {name: shape for name, shape in shapes.items() if name not in absent}


def check_head(config: object, weights: Mapping[str, Any]) -> None:
    """Refuse another configuration, and weights of either framework that a head of this one has no use for.

    Raises:
        ArgumentTypeError: no `EagleConfig`.
        ModelError: names the weights.
    """
    if not isinstance(config, EagleConfig):
        refuse("config", "an EagleConfig", type(config).__name__, "say how the head reads its target", ArgumentTypeError)
    unused = sorted(set(weights) - set(config.weight_shapes()) - {"head"})
    if unused:
        refuse("weights", "only those of config.weight_shapes() and 'head'", f"also {unused}", "check the configuration", ModelError)


def fed_features(config: EagleConfig, batch: ForwardBatch) -> Array:
    """Features of a batch of either framework, if a head can run it.

    Raises:
        ModelError: features are missing or do not fit, or hidden states are wanted.
    """
    features, count, widths = batch.features, batch.input_ids.shape[0], (config.features.size, config.hidden_size)
    if features is None or tuple(features.shape) not in [(count, width) for width in widths]:
        expected, found = f"[{count}, {widths[0]}] or [{count}, {widths[1]}]", None if features is None else tuple(features.shape)
        refuse("features", expected, found, "draft with funcspec.drafters.eagle", ModelError)
    if batch.hidden_layers:
        refuse("hidden_layers", "none, as a head hands on its own state", batch.hidden_layers, "use a Llama as target", ModelError)
    return features


@dataclass(frozen=True, eq=False)
class EagleHead(LlamaLayers):
    """A head as a `Model` that reads hidden states of a target; a drafter is made of it with `funcspec.drafters.eagle`.

    At position x it reads the target's hidden state of x, or what it handed on itself at x - 1, and the token of x + 1. It foresees the
    token of x + 2.

    Attributes:
        config: its shape, and how it reads.
        weights: tensors by name, as `EagleConfig.weight_shapes` lists them, all of one dtype and device. "embed" may be the target's.
            A "head" [output rows, hidden_size], perhaps the target's too, replaces the embedding as the output matrix.
        output_token_ids: as for `Llama`.

    Example:
        >>> import funcspec as fs
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> drafter = fs.drafters.eagle(random_head(EagleConfig(**shape, head_dim=4, max_len=16, target_layers=(2,))))

    Reference: Li et al. 2024, "EAGLE", arXiv 2401.15077, and "EAGLE-2", arXiv 2406.16858; Li et al. 2025, "EAGLE-3", arXiv 2503.01840;
    DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437.
    """

    config: EagleConfig

    def __post_init__(self) -> None:
        check_head(self.config, self.weights)
        super().__post_init__()

    @property
    def features(self) -> FeatureSpec:
        """What it reads of the target."""
        return self.config.features

    @torch.no_grad()
    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run a batch; see `Model.forward`.

        Args:
            kv: "key" and "value", [num_layers, num_blocks, block_size, num_kv_heads, head_dim], written in place.
            batch: what to run: at each position the token of the next one, with features [T, features.size] of the target, or [T,
                hidden_size] that the head handed on.

        Returns:
            kv, logits [M, vocab_size] in the weights' dtype, and one state [M, hidden_size] to hand on.

        Raises:
            ModelError: features are missing or do not fit, or hidden states are wanted.
        """
        return kv, *self.answer(self.run(kv, batch), batch)

    def run(self, kv: KV, batch: ForwardBatch) -> torch.Tensor:
        """Write kv in place and return what the layers leave at each place, [T, hidden_size] or a few rows more."""
        features = fed_features(self.config, batch).to(self.dtype)
        x, first_input = self._read(self._padded(F.embedding(batch.input_ids, self.weights["embed"])), self._padded(features))
        return self._run_layers(x, kv, batch, first_input)[0]

    def answer(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        """Logits and states, where the batch wants logits, of what `run` returned."""
        chosen = x[: batch.input_ids.shape[0]] if batch.logits_indices is None else x.index_select(0, batch.logits_indices)
        state = self.handed_on(chosen)
        return self._products["head"](state if self.config.feedback == "normalised" else self._normalise(chosen, "norm")), (state,)

    def handed_on(self, x: torch.Tensor) -> torch.Tensor:
        """States of some of what `run` returned."""
        return self._normalise(x, "norm") if self.config.feedback == "normalised" else x

    def _read(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What enters the layers, and what the first attention reads if that is not the same normalised."""
        embedded = self._normalise(embedded, "embed_norm")
        if self.config.style == "eagle3":
            x = features if features.shape[1] == self.config.hidden_size else self._products["fc"](features)
            return x, torch.cat([embedded, self._normalise(x, "feature_norm")], 1)
        x = self._products["fc"](torch.cat([embedded, self._normalise(features, "feature_norm")], 1))
        return x + self.weights["fc_bias"] if self.config.fc_bias else x, None


@dataclass(frozen=True, eq=False)
class ModuleStack:
    """What `MtpModules` and `JaxMtpModules` share.

    Attributes:
        modules: heads of one configuration, in the order of the drafts.
        depth: which module answers.
    """

    modules: tuple[Any, ...]
    depth: int = 0
    kind: ClassVar[type]

    def __post_init__(self) -> None:
        if not isinstance(self.modules, tuple) or not all(isinstance(module, self.kind) for module in self.modules):
            refuse("modules", f"a tuple of {self.kind.__name__}", repr(self.modules)[:60], "make them of one framework", ArgumentTypeError)
        if len(self.modules) < 2:
            refuse("modules", "two or more", len(self.modules), "draft with funcspec.drafters.mtp and the module itself", ModelError)
        shapes = {(module.config, module.vocab_size, module.dtype) for module in self.modules}
        if len(shapes) > 1 or self.modules[0].config.style == "eagle3":
            found = f"{len(shapes)} configurations, of {self.modules[0].config.style!r}"
            refuse(
                "modules", "one configuration, vocabulary and dtype, not of 'eagle3'", found, "use the modules of one target", ModelError
            )

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.modules[0].vocab_size

    @property
    def input_vocab_size(self) -> int:
        """Number of token ids that can be fed."""
        return self.modules[0].input_vocab_size

    @property
    def max_len(self) -> int:
        """Number of positions."""
        return self.modules[0].max_len

    @property
    def dtype(self) -> Any:
        """Dtype of weights, cache and logits, of the framework."""
        return self.modules[0].dtype

    @property
    def features(self) -> FeatureSpec:
        """What the first module reads of the target."""
        return self.modules[0].features

    @property
    def kv_spec(self) -> KVSpec:
        """Entries "key" and "value" for the layers of all modules, and "state", what each module hands to the next."""
        one = self.modules[0].kv_spec
        state = KVEntry("state", (self.features.feedback,), one.entries[0].dtype)
        return KVSpec(len(self.modules) * one.num_layers, (*one.entries, state))

    def at_depth(self, depth: int) -> Self:
        """The same modules, of which another answers."""
        return replace(self, depth=depth)

    def _layers(self, depth: int) -> slice:
        """Layers of the cache that are one module's."""
        count = self.modules[0].num_layers
        return slice(depth * count, (depth + 1) * count)

    def _later(self) -> range:
        """Modules that a pass runs only for what they keep: those behind the one that answers."""
        return range(self.depth + 1, len(self.modules))


@dataclass(frozen=True, eq=False)
class MtpModules(ModuleStack):
    """Modules for multi-token prediction, one for each draft, as one `Model`; a drafter is made of it with `funcspec.drafters.mtp`.

    Module d (from 0) was trained to read at place i the state that module d - 1 made at place i, which for module 0 is the target's, and
    the token of i + d + 1. Here all of that is kept d places later, at x = i + d: at x every module reads the token of x + 1, and module
    d the state that module d - 1 made at x - 1. Nothing is at the first d places. Rotary embeddings are relative, so it is the same.

    A pass over committed tokens runs all modules and answers with the first. In the passes that follow, each over one draft more,
    `at_depth` gives the next module the word, and runs those behind it, which attend to this place later.

    Attributes:
        modules: heads of one configuration, in the order of the drafts.
        depth: which module answers.

    Reference: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2, arXiv 2412.19437.
    """

    modules: tuple[EagleHead, ...]
    kind: ClassVar[type] = EagleHead

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.modules[0].device

    @torch.no_grad()
    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run a batch; see `EagleHead.forward`.

        Args:
            kv: the entries of `kv_spec`, written in place.
            batch: what to run: at depth 0 committed tokens, else one place a row with what the module before handed on.

        Returns:
            kv, logits [M, vocab_size] and one state [M, hidden_size] to hand on, of the module at this depth.

        Raises:
            ModelError: as for `EagleHead.forward`.
        """
        x = self._run(kv, batch, self.depth)
        answer = self.modules[self.depth].answer(x, batch)
        for depth in self._later():
            states = self.modules[depth - 1].handed_on(x[: batch.input_ids.shape[0]])
            x = self._run(kv, replace(batch, features=self._moved(kv, batch, depth, states)), depth)
        return kv, *answer

    def _run(self, kv: KV, batch: ForwardBatch, depth: int) -> torch.Tensor:
        """Run one module on its part of the cache."""
        own = {name: kv[name][self._layers(depth)] for name in ("key", "value")}
        if depth > 0:  # in blocks of one place each, single places can be left out of the tables
            offsets = torch.arange(own["key"].shape[2], dtype=torch.int32, device=self.device)
            blocks = batch.block_tables[:, :, None]
            tables = torch.where(blocks < 0, -1, blocks * len(offsets) + offsets).flatten(1)
            tables[:, :depth] = -1
            own, batch = {name: cache.flatten(1, 2).unsqueeze(2) for name, cache in own.items()}, replace(batch, block_tables=tables)
        return self.modules[depth].run(own, batch)

    def _moved(self, kv: KV, batch: ForwardBatch, depth: int, states: torch.Tensor) -> torch.Tensor:
        """Keep the states of the module before this one; return those of one place earlier."""
        cache = kv["state"][self._layers(depth - 1)][0].unsqueeze(2)
        write_kv_(out_key_cache=cache, out_value_cache=cache, key=states[:, None], value=states[:, None], slot_mapping=batch.slot_mapping)
        size, places = cache.shape[1], torch.arange(batch.input_ids.shape[0], dtype=torch.int32, device=self.device)
        rows = torch.searchsorted(batch.query_start_loc[1:], places, right=True).clamp_(max=batch.seq_lens.shape[0] - 1)
        earlier = (batch.positions - 1).clamp_(min=0)
        slots = batch.block_tables[rows, earlier // size].clamp_(min=0) * size + earlier % size
        return cache.flatten(0, 2).index_select(0, slots)


def random_head(config: EagleConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> EagleHead:
    """A head with random weights, for tests: the same for the same seed.

    Args:
        config: shape.
        seed: of the weights.
        dtype: of weights, cache and logits.
        device: where to put the weights.
    """
    return EagleHead(config, random_weights(config, seed, dtype, device))


__all__ = ["EagleConfig", "EagleHead", "ModuleStack", "MtpModules", "check_head", "fed_features", "random_head"]
