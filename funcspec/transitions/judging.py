"""Judging on an open step: the target's pass over a round, and what the rule makes of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from funcspec.kernels.acceptance import accept_matching_
from funcspec.kernels.early_stops import mask_early_stops_
from funcspec.kernels.keep_features import keep_features_
from funcspec.kernels.ratio import judge_drafts_
from funcspec.kernels.recovery import recover_tokens_
from funcspec.kernels.window_inputs import VERIFY
from funcspec.models.base import Array, Model
from funcspec.noise import TARGET
from funcspec.transitions.framework import Framework, Window, check_states
from funcspec.transitions.shapes import judging_shapes, recovery_shapes


class Judging(Framework):
    """What `score`, `accept` and `verify` do."""

    def score(self, model: Model) -> tuple[Window, Array]:
        """Run the target over the newest token and the drafts of every row; logits [R * (K + 1), V]."""
        config = self.config
        self.prepare_write("target")
        window = self.verified_window()
        spec = self.partners["draft"].features if "draft" in self.partners else None
        batch = window.batch if spec is None else replace(window.batch, hidden_layers=spec.layers)
        logits, hidden = self.forward("target", model, batch, config.max_num_reqs * (config.num_speculative_tokens + 1))
        if spec is not None:
            check_states("target", hidden, len(spec.layers), (batch.input_ids.shape[0], spec.size // len(spec.layers)))
            for index, states in enumerate(hidden):
                features, column = self.features(write=True), index * (spec.size // len(spec.layers))
                self.run(keep_features_, hidden=states, is_live=self.fields.is_live, features=features, first_column=column)
        self.advance("target")
        return window, logits

    def verified_window(self) -> Window:
        """The places that a verdict is about: the newest token and the drafts of every row."""
        width = self.config.num_speculative_tokens + 1
        return self.window("target", VERIFY, width, limit=self.config.max_model_len, all_logits=True)

    def accept(self, window: Window, logits: Array) -> dict[str, Array]:
        """Choose the round's tokens, match the drafts with them, trim, commit: the rest of `verify` after the forward.

        Returns:
            the fields of a verdict by name.
        """
        logits = self._without_early_stops(window, logits)
        proposals = self.proposals() if self.judges_ratios else {}
        if proposals:
            chosen, bad = self._judge(window, logits, proposals)
        else:
            chosen, bad = self.choose("target", logits, window, stream=TARGET)
        fields, rows, width = self.fields, self.config.max_num_reqs, self.config.num_speculative_tokens + 1
        places, counts = ("out_tokens", "out_origin"), ("out_num_accepted", "out_num_emitted", "out_num_drafted", "out_bad_row")
        out = self.run(
            accept_matching_,
            chosen=chosen,
            bad=bad,
            row_limit=fields.row_limit,
            stop_ids=fields.stop_ids,
            tokens=fields.tokens,
            num_tokens=fields.num_tokens,
            num_draft=fields.num_draft,
            num_drafted=fields.num_drafted,
            is_live=fields.is_live,
            finish_reason=fields.finish_reason,
            bad_row=fields.bad_row,
            **self.records(**dict.fromkeys(places, (rows, width)), **dict.fromkeys(counts, (rows,))),
        )
        self.settle()
        verdict = {name.removeprefix("out_"): out[name] for name in places + counts}
        return verdict | {"finish_reason": self.copied(self.fields.finish_reason)}

    def _without_early_stops(self, window: Window, logits: Array) -> Array:
        """The logits, with the stop ids of rows that are still too short made -inf; in a buffer of our own, not the model's."""
        if not self.config.allows_min_tokens:
            return logits
        out = self.run(
            mask_early_stops_,
            logits=logits,
            token_rows=window.token_rows,
            positions=window.batch.positions,
            stop_ids=self.fields.stop_ids,
            min_len=self.fields.min_len,
            out_logits=self.scratch_like("target", logits),
        )
        return out["out_logits"]

    def _judge(self, window: Window, logits: Array, proposals: Mapping[str, Array]) -> tuple[Array, Array]:
        """Judge the drafts by ratios; the tokens of the round and their flags, as `choose` gives them."""
        fields, rows, width = self.fields, self.config.max_num_reqs, self.config.num_speculative_tokens + 1
        shared: dict[str, Any] = {
            "logits": logits,
            "positions": window.batch.positions,
            "temperature": fields.temperature,
            "seed": fields.seed,
            "tokens": fields.tokens,
            "num_tokens": fields.num_tokens,
            **proposals,
        }
        judged = self.run(
            judge_drafts_,
            **shared,
            num_draft=fields.num_draft,
            num_drafted=fields.num_drafted,
            is_live=fields.is_live,
            coins=None,
            **self.scratch("target", judging_shapes, *logits.shape),
        )
        chosen, bad = self.choose("target", logits, window, stream=TARGET, logits_indices=judged["out_indices"])
        out = self.run(
            recover_tokens_,
            **shared,
            verdicts=judged["out_verdicts"],
            judged_bad=judged["out_bad"],
            normalisers=judged["out_normalisers"],
            chosen=chosen,
            chosen_bad=bad,
            **self.scratch("target", recovery_shapes, rows, width, logits.shape[1]),
        )
        return out["out_chosen"], out["out_bad"]


__all__ = ["Judging"]
