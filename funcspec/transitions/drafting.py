"""Drafting on an open step: one pass of a draft model, and what is kept of the drafts."""

from funcspec.errors import StepOrderError
from funcspec.kernels.append_drafts import append_drafts_
from funcspec.kernels.normalisers import keep_proposals_
from funcspec.kernels.window_inputs import DRAFTED, FEED
from funcspec.models.base import Array, Model
from funcspec.transitions.framework import Framework
from funcspec.transitions.shapes import summing_shapes


class Drafting(Framework):
    """What drafters call."""

    _drafts: Array | None = None

    def draft_once(self, model: Model, *, first: bool, token_ids: Array | None, wanted: Array) -> None:
        """Draft one token a row with a model that has its own KV: derive inputs, run, sample, append.

        It may be called once in a step: small buffers are written only after a step's last forward.

        Args:
            model: the draft model.
            first: whether this is draft step 0, which feeds everything committed since the last round.
            token_ids: [V] int32 draft id to target id, or None where they are the same.
            wanted: [R] int32, drafts asked for this round; read at step 0.
        """
        config = self.config
        if self._drafts is not None:
            raise StepOrderError("drafter: expected one call of draft_once in a step, got two. Fix: write once, after the last forward.")
        self.prepare_write("draft")
        width = config.num_speculative_tokens + 1 if first else 1
        window = self.window("draft", FEED if first else DRAFTED, width, limit=model.max_len)
        logits = self.forward("draft", model, window.batch, config.max_num_reqs)
        chosen, _ = self.choose("draft", logits, window, stream=config.rule.draft_stream, token_ids=token_ids)
        self._keep_proposals(logits, chosen, first=first, token_ids=token_ids)
        self._append(chosen, first=first, wanted=wanted, draft_limit=min(model.max_len, config.max_model_len))
        self.advance("draft")

    def drafts(self) -> Array:
        """This round's drafts so far, [R, K] int32 of its own, -1 where there is none."""
        if self._drafts is None:  # a drafter that needed no pass in this step: nothing is appended, the drafts are only read
            nothing = self.constant(-1)
            self._append(nothing, first=False, wanted=self.fields.num_draft, draft_limit=self.config.max_model_len)
        return self._drafts

    def keep_drafts(self, drafts: Array, *, points: Array) -> None:
        """Take note of drafts that a drafter wrote with an operation of its own, instead of `draft_once` or besides it.

        The operation must have written tokens, num_draft and num_drafted, after the step's last forward.

        Args:
            drafts: [R, K] int32, this round's drafts, -1 where there is none; not used by anyone else.
            points: [R] int32, not 0 for rows whose drafts were just proposed, not drawn from a distribution. It holds for all
                drafts of the round so far, and for those to come until this function or `draft_once` at step 0 is called again.
        """
        self._drafts = drafts
        if self.judges_ratios:
            self.put_proposals(is_point=points)

    def _keep_proposals(self, logits: Array, chosen: Array, *, first: bool, token_ids: Array | None) -> None:
        """Keep what the drafts were drawn from, if the rule asks for it."""
        if not self.judges_ratios:
            return
        fields = self.fields
        if self.proposes_points:
            if first:
                self.put_proposals(is_point=self.constant(1))
            return
        self.run(
            keep_proposals_,
            first=first,
            logits=logits,
            chosen=chosen,
            temperature=fields.temperature,
            num_draft=fields.num_draft,
            num_drafted=fields.num_drafted,
            token_ids=token_ids,
            **self.proposals(write=True),
            **self.scratch("draft", summing_shapes, *logits.shape),
        )

    def _append(self, chosen: Array, *, first: bool, wanted: Array, draft_limit: int) -> None:
        fields, config = self.fields, self.config
        out = self.run(
            append_drafts_,
            first=first,
            chosen=chosen,
            num_tokens=fields.num_tokens,
            row_limit=fields.row_limit,
            is_live=fields.is_live,
            wanted=wanted,
            tokens=fields.tokens,
            num_draft=fields.num_draft,
            num_drafted=fields.num_drafted,
            draft_len=fields.draft_len,
            draft_limit=draft_limit,
            **self.records(out_tokens=(config.max_num_reqs, config.num_speculative_tokens)),
        )
        self._drafts = out["out_tokens"]


__all__ = ["Drafting"]
