"""Drafting on an open step: one pass of a draft model, and what is kept of the drafts."""

from dataclasses import replace
from typing import Any

from funcspec.errors import StepOrderError
from funcspec.kernels.append_drafts import append_drafts_
from funcspec.kernels.keep_features import keep_features_
from funcspec.kernels.keep_matching import keep_matching_
from funcspec.kernels.normalisers import keep_proposals_
from funcspec.kernels.window_inputs import DRAFTED, FEED
from funcspec.models.base import Array, FeatureSpec, Model
from funcspec.transitions.framework import Framework, Guess, check_states
from funcspec.transitions.shapes import summing_shapes


class Drafting(Framework):
    """What drafters call."""

    _drafts: Array | None = None

    def draft_once(self, model: Model, *, first: bool, token_ids: Array | None, wanted: Array, guess: Guess | None = None) -> None:
        """Draft with one pass of a model that has its own KV: derive inputs, run, sample, append.

        It may be called once in a step: small buffers are written only after a step's last forward.

        Args:
            model: the draft model.
            first: whether this is draft step 0, which feeds everything committed since the last round.
            token_ids: [V] int32 draft id to target id, or None where they are the same.
            wanted: [R] int32, drafts asked for this round; read at step 0.
            guess: how the pass guesses several tokens a row, at step 0; None for the one that follows the newest.
        """
        config, rows = self.config, self.config.max_num_reqs
        if self._drafts is not None:
            raise StepOrderError("drafter: expected one call of draft_once in a step, got two. Fix: write once, after the last forward.")
        self.prepare_write("draft")
        spec, lag = self.partners["draft"].features, self.partners["draft"].lag
        shift, query_only = (0, False) if spec is None else (spec.ahead, bool(spec.cache_layers))
        num_masks, count, offset = (0, 1, shift) if guess is None else (guess.num_masks, guess.num_choices, shift - guess.choice_offset)
        width = config.num_speculative_tokens + 1 + lag - shift + num_masks if first else 1
        limit = min(model.max_len, config.max_model_len)
        window = self.window("draft", FEED if first else DRAFTED, width, limit=limit, guess=guess, shift=shift, query_only=query_only)
        batch = window.batch if spec is None else replace(window.batch, features=self._fed_features(spec, first=first))
        logits, hidden = self.forward("target" if query_only else "draft", model, batch, rows * count)
        if spec is not None and spec.feedback:
            check_states("drafter", hidden, 1, (rows * count, spec.feedback))
        stream, held = config.rule.draft_stream, self.draft_steps if query_only else 0  # noise is that of the places that are foreseen
        how: dict[str, Any] = {"position_offset": offset + held, "greedy": self.drafts_argmax}
        chosen, _ = self.choose("draft", logits, window, stream=stream, token_ids=token_ids, **how)
        if guess is not None and guess.masks is not None:
            chosen = self.run(keep_matching_, guesses=guess.masks, chosen=chosen)["chosen"]
        self._keep_proposals(logits, chosen, first=first, token_ids=token_ids)
        if spec is not None and spec.feedback:
            features = self.features(write=True)
            self.run(keep_features_, hidden=hidden[0], is_live=self.fields.is_live, features=features, first_column=0)
        # A row that was cut back has no features to feed, and later steps must not go on from it.
        seq_lens = None if spec is None else batch.seq_lens
        self._append(chosen, first=first, wanted=wanted, draft_limit=limit + offset, lag=lag, num_chosen=count, seq_lens=seq_lens)
        self.advance("draft")

    def _fed_features(self, spec: FeatureSpec, *, first: bool) -> Array:
        """Features for a pass: those of its first places, or in later passes what the draft handed on."""
        features = self.features()
        return features.reshape(-1, spec.size) if first else features[:, 0, : spec.feedback]

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
            self.mark_points(points)

    def _keep_proposals(self, logits: Array, chosen: Array, *, first: bool, token_ids: Array | None) -> None:
        """Keep what the drafts were drawn from, if the rule asks for it."""
        if not self.judges_ratios:
            return
        fields = self.fields
        if self.proposes_points:
            if first:
                self.mark_points(self.constant(1))
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

    def _append(self, chosen: Array, *, first: bool, wanted: Array, draft_limit: int, **planning: Any) -> None:
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
            **planning,
            **self.records(out_tokens=(config.max_num_reqs, config.num_speculative_tokens)),
        )
        self._drafts = out["out_tokens"]


__all__ = ["Drafting"]
