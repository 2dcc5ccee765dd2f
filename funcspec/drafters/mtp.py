"""Multi-token prediction: modules that were trained with their target draft for it, one used again or one for each draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.base import Proposal
from funcspec.drafters.eagle import Eagle, check_handing_on
from funcspec.drafters.pairs import check_draft, check_pair
from funcspec.errors import ModelError, refuse
from funcspec.models.base import Array, Model
from funcspec.models.heads import MtpModules
from funcspec.models.jax_heads import JaxMtpModules

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Mtp:
    """Modules as a drafter, one for each draft; see `mtp`."""

    model: MtpModules | JaxMtpModules
    token_ids: Array | None = None
    proposal: Proposal = "sampled"

    @property
    def kv_model(self) -> Model:
        """The modules."""
        return self.model

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the pair, and that there are modules for all drafts."""
        check_pair(self.model, self.token_ids, target)
        count, drafts = len(self.model.modules), config.num_speculative_tokens
        if drafts > count:
            refuse("num_speculative_tokens", f"at most {count}, one a module", drafts, "draft fewer, or use one module again", ModelError)

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Feed all modules what was committed, and draft a token with the first."""
        transition.draft_once(self.model, first=True, token_ids=self.token_ids, wanted=wanted)

    def next(self, transition: "Transition") -> None:
        """Feed the newest draft to the next module, with the state of the one before, and draft a token; feed it to later modules too."""
        model = self.model.at_depth(transition.draft_steps)
        transition.draft_once(model, first=False, token_ids=self.token_ids, wanted=transition.fields.num_draft)


# Like `Standalone`: with modules of JAX their weights are no constants of a program that takes the drafter as an argument.
jax.tree_util.register_dataclass(Mtp, data_fields=["model", "token_ids"], meta_fields=["proposal"])


def mtp(modules: Model | Sequence[Model], token_ids: Array | None = None) -> Eagle | Mtp:
    """Make a drafter of modules for multi-token prediction.

    One module is used again for every draft, on its own states, like an EAGLE head. Of several each makes one draft: module d reads the
    state that module d - 1 made at the same place, as in training, and what was committed is fed to all of them.

    Args:
        modules: a head as for `eagle`, in the style "mtp" of `funcspec.models.heads.EagleConfig` or any other; or a list of several
            `EagleHead` or `JaxEagleHead` of one configuration, at least as many as drafts a round.
        token_ids: as for `eagle`; the same for all modules.

    Raises:
        ArgumentTypeError, ArgumentError: as for `eagle`, or the list holds something else.
        ModelError: the modules are no such heads, or not of one configuration.

    Example:
        >>> import funcspec as fs
        >>> from funcspec.models.heads import EagleConfig, random_head
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> config = EagleConfig(**shape, head_dim=4, max_len=16, target_layers=(2,), style="mtp")
        >>> drafter = fs.drafters.mtp([random_head(config, seed=seed) for seed in range(3)])

    Reference: Gloeckle et al. 2024, "Better & faster large language models via multi-token prediction", arXiv 2404.19737;
    DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437.
    """
    given: tuple[Any, ...] = tuple(modules) if isinstance(modules, list | tuple) else (modules,)
    if len(given) == 1:
        check_draft("modules", given[0], token_ids)
        check_handing_on("modules", given[0])
        return Eagle(given[0], token_ids)
    of_jax = bool(given) and getattr(given[0], "framework", "torch") == "jax"
    stack = JaxMtpModules(given) if of_jax else MtpModules(given)
    check_draft("modules", stack, token_ids)
    return Mtp(stack, token_ids)


__all__ = ["Mtp", "mtp"]
