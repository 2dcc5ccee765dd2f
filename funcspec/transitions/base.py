"""The bodies of the steps, written once for both frameworks.

A step opens a transition on a state, derives inputs, runs a model, samples and advances, and closes it into a new state. The bodies
hold only operations, model calls and static sizes. Every operation gives back what it wrote: in torch that is the buffer it was given,
in JAX a new array. Where arrays live, who may write them and what a new state is made of is up to the two subclasses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from funcspec.errors import refuse
from funcspec.models.base import Array, Model
from funcspec.transitions.drafting import Drafting
from funcspec.transitions.framework import Ingested, check_states
from funcspec.transitions.judging import Judging


class Transition(Drafting, Judging):
    """A step in progress. Drafters and rules work on it and never see how purity, donation and copy-on-write are done."""

    def ingest_row(
        self,
        models: Mapping[str, Model],
        blocks: Mapping[str, Any],
        tokens: Sequence[int],
        counts: Mapping[str, int],
        chunk: int,
        rope: np.ndarray | None = None,
    ) -> Ingested:
        """Feed the first tokens of a row to all models.

        Args:
            models: by role; a draft that reads hidden states needs the target.
            blocks: by role, blocks of the row that `reserve` returned.
            tokens: token ids of the row.
            counts: by role, how many positions are to be fed; those of a draft that reads hidden states are the target's too.
            chunk: most tokens in a pass.
            rope: [A, L] rotary positions of the row, if the target has its own.

        Returns:
            what feeding the target gave.
        """
        spec = self.partners["draft"].features if "draft" in models else None
        layers = () if spec is None else spec.layers
        target = self.ingest("target", models["target"], blocks["target"], tokens[: counts["target"]], chunk, layers=layers, rope=rope)
        if spec is not None:
            check_states("target", (target.features,), 1, (counts["target"], spec.size))
        if "draft" in models and not (spec and spec.cache_layers):  # such a draft has nothing of its own to fill
            count, ahead = counts["draft"], 0 if spec is None else spec.ahead
            features = None if target.features is None else target.features[:count]
            own = rope if self.partners["draft"].rope_axes else None
            self.ingest("draft", models["draft"], blocks["draft"], tokens[ahead : ahead + count], chunk, features=features, rope=own)
        return target

    def wanted(self, num_draft: object) -> Array:
        """Turn the number of drafts a caller asks for into [R] int32 on the device.

        Numbers are checked; the values of an array are not read, as that would wait for the GPU, and are clipped to 0..K later.
        """
        config = self.config
        most, rows = config.num_speculative_tokens, config.max_num_reqs
        if self.is_array(num_draft):
            self.check_array("num_draft", num_draft, (rows,), "an int32", "give every row a number")
            return num_draft
        counts = [most if num_draft is None else num_draft] * rows if num_draft is None or isinstance(num_draft, int) else num_draft
        if not isinstance(counts, Sequence) or len(counts) != rows:
            refuse("num_draft", f"an int or {rows} ints", repr(num_draft), "give one number, or one for each row")
        if any(not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most for count in counts):
            allowed = f"numbers from 0 to num_speculative_tokens = {most}"
            refuse("num_draft", allowed, repr(num_draft), "draft fewer or raise the configuration's K")
        return self.constant(counts[0]) if len(set(counts)) == 1 else self.vector(counts)


__all__ = ["Transition"]
