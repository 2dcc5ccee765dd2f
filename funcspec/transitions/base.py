"""The bodies of the steps, written once for both frameworks.

A step opens a transition on a state, derives inputs, runs a model, samples and advances, and closes it into a new state. The bodies
below hold only operations, model calls and static sizes. Every operation gives back what it wrote: in torch that is the buffer it
was given, in JAX a new array. Where arrays live, who may write them and what a new state is made of is up to the two subclasses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from funcspec.config import SpecConfig
from funcspec.errors import StepOrderError, refuse
from funcspec.kernels.acceptance import accept_matching_
from funcspec.kernels.append_drafts import append_drafts_
from funcspec.kernels.choose_tokens import choose_tokens_
from funcspec.kernels.normalisers import keep_proposals_
from funcspec.kernels.op import Op
from funcspec.kernels.ratio import judge_drafts_
from funcspec.kernels.recovery import recover_tokens_
from funcspec.kernels.window_inputs import DRAFTED, FEED, VERIFY, window_inputs_
from funcspec.models.base import Array, ForwardBatch, Model
from funcspec.noise import DRAFT, TARGET
from funcspec.state import SpecState
from funcspec.transitions.shapes import Shapes, choice_shapes, judging_shapes, recovery_shapes, summing_shapes, window_shapes

Kind = Literal["an int32", "a float"]
"""Elements of an array that a caller passes; floats are float32, bfloat16 or float16."""


@dataclass(frozen=True)
class Window:
    """Inputs of a pass with the same number of places in each row; valid until the step's next pass of that width.

    Attributes:
        batch: what the model is given.
        token_rows: [T] int32, the row of each place, -1 where there is no token.
    """

    batch: ForwardBatch
    token_rows: Array


class Transition(ABC):
    """A step in progress. Drafters and rules work on it and never see how purity, donation and copy-on-write are done.

    Attributes:
        config: the state's configuration.
        name: the step's name, numbered, for messages.
        fields: the small buffers, as attributes by name; read and, after the last forward, written through `run`.
        phase, stamp, draft_steps: where in a round the input state is.
        proposes_points: whether all drafts of the step's drafter are just proposed, whatever they were drawn from.
    """

    config: SpecConfig
    name: str
    fields: Any
    phase: str
    stamp: object
    draft_steps: int
    proposes_points: bool = False
    _drafts: Array | None = None

    def window(self, role: str, kind: int, width: int, *, limit: int, all_logits: bool = False) -> Window:
        """Derive the inputs of a pass of `width` places a row (one kernel).

        Args:
            role: "target" or "draft".
            kind: `FEED`, `DRAFTED` or `VERIFY` of `funcspec.kernels.window_inputs`.
            width: places a row has.
            limit: positions the model can take.
            all_logits: whether logits are wanted everywhere, not only at each row's last token.
        """
        fields, config, table = self.fields, self.config, self.table(role)
        out = self.run(
            window_inputs_,
            kind=kind,
            tokens=fields.tokens,
            num_tokens=fields.num_tokens,
            fed_len=fields.draft_len,
            num_draft=fields.num_draft,
            num_drafted=fields.num_drafted,
            is_live=fields.is_live,
            block_tables=table,
            block_size=config.block_size,
            width=width,
            limit=limit,
            **self.scratch(role, window_shapes, config.max_num_reqs, width),
        )
        batch = ForwardBatch(
            out["out_input_ids"],
            out["out_positions"],
            self.row_starts(width),
            out["out_seq_lens"],
            out["out_slot_mapping"],
            table,
            None if all_logits or width == 1 else out["out_last_token_indices"],
            width,
        )
        return Window(batch, out["out_token_rows"])

    def choose(
        self,
        role: str,
        logits: Array,
        window: Window,
        *,
        stream: int,
        logits_indices: Array | None = None,
        token_ids: Array | None = None,
    ) -> tuple[Array, Array]:
        """Choose a token from each row of logits [M, V]: arg-max at temperature 0, else drawn with the row's exact noise.

        Noise of DRAFT differs from round to round. `logits_indices` [M] int32 may say which place of the window each row of logits is of,
        -1 to choose none; `token_ids` [V] int32 which target ids the columns are.

        Returns:
            tokens [M] int32 in target ids, and [M] int32: 1 where logits were not finite or nothing was allowed.
        """
        out = self.run(
            choose_tokens_,
            logits=logits,
            logits_indices=window.batch.logits_indices if logits_indices is None else logits_indices,
            token_rows=window.token_rows,
            positions=window.batch.positions,
            temperature=self.fields.temperature,
            seed=self.fields.seed,
            stream=stream,
            nonce_length=self.fields.num_tokens if stream == DRAFT else None,
            token_ids=token_ids,
            **self.scratch(role, choice_shapes, *logits.shape),
        )
        return out["out_tokens"], out["out_bad"]

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
        if self._judges_ratios:
            self.put_proposals(is_point=points)

    @property
    def _judges_ratios(self) -> bool:
        return self.config.rule.judges_by == "ratio" and self.config.num_speculative_tokens > 0

    def _keep_proposals(self, logits: Array, chosen: Array, *, first: bool, token_ids: Array | None) -> None:
        """Keep what the drafts were drawn from, if the rule asks for it."""
        if not self._judges_ratios:
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

    def score(self, model: Model) -> tuple[Window, Array]:
        """Run the target over the newest token and the drafts of every row; logits [R * (K + 1), V]."""
        config = self.config
        self.prepare_write("target")
        window = self.verified_window()
        logits = self.forward("target", model, window.batch, config.max_num_reqs * (config.num_speculative_tokens + 1))
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
        proposals = self.proposals() if self._judges_ratios else {}
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

    def table(self, role: str) -> Array:
        """Block table [R, N] of a role."""
        return self.fields.block_tables if role == "target" else self.fields.draft_block_tables

    # What the frameworks do in their own ways.

    @abstractmethod
    def run(self, op: Op, **arguments: Any) -> Mapping[str, Any]:
        """Run an operation. A written argument that is named like a field is that field, and is from now on what was written.

        The same holds for what `proposals` returns.

        Returns:
            the arguments by name, as they are after the operation.
        """

    @abstractmethod
    def scratch(self, role: str, shapes: Callable[..., Shapes], *sizes: int) -> Mapping[str, Array]:
        """Buffers `shapes(*sizes)` of any contents, for use within the step."""

    @abstractmethod
    def records(self, **shapes: tuple[int, ...]) -> Mapping[str, Array]:
        """New int32 buffers for an info record, which no later step touches."""

    @abstractmethod
    def proposals(self, *, write: bool = False) -> Mapping[str, Array]:
        """What this round's drafts were drawn from, by the names in `funcspec.leases.PROPOSALS`.

        Args:
            write: whether they will be written. To read them, the result may be empty: nothing was drafted.
        """

    @abstractmethod
    def put_proposals(self, **values: Array) -> None:
        """Replace some of the proposals by arrays of their shapes and dtypes, of the framework or on the host."""

    @abstractmethod
    def copied(self, array: Array) -> Array:
        """An array as it is now, which no later step touches."""

    @abstractmethod
    def detached(self, array: Array) -> Array:
        """An array that no gradient flows through."""

    @abstractmethod
    def constant(self, value: int) -> Array:
        """[R] int32 of one value, read only."""

    @abstractmethod
    def vector(self, values: Sequence[int]) -> Array:
        """[R] int32 of these values."""

    @abstractmethod
    def row_starts(self, width: int) -> Array:
        """[R + 1] int32: where each row's places begin in a window of `width` places a row."""

    @abstractmethod
    def is_array(self, value: object) -> bool:
        """Whether a value is an array of the framework."""

    @abstractmethod
    def check_array(self, argument: str, value: Any, shape: tuple[int, ...], kind: Kind, fix: str) -> None:
        """Refuse what is not an array of the framework with this shape and kind of elements, on the state's device."""

    @abstractmethod
    def forward(self, role: str, model: Model, batch: ForwardBatch, count: int) -> Array:
        """Run the model on the role's KV and check what it returns: logits [count, model.vocab_size]."""

    @abstractmethod
    def prepare_write(self, role: str) -> None:
        """Make sure the step may write the role's KV.

        Raises:
            PoolExhaustedError: no room to copy on write; nothing was written.
        """

    @abstractmethod
    def advance(self, role: str) -> None:
        """Note that the step wrote the role's KV past the committed length."""

    @abstractmethod
    def settle(self) -> None:
        """Note that what was scored is committed."""

    @abstractmethod
    def close(self, phase: str, *, stamp: object = None, draft_steps: int = 0) -> SpecState:
        """Turn the transition into the new state; a donated input dies here."""

    # For admission, release and restoring, outside the rounds.

    @abstractmethod
    def reserve(self, role: str, counts: Sequence[int]) -> list[Any]:
        """Take `counts[i]` free blocks for the i-th new row, all or nothing.

        Raises:
            PoolExhaustedError: too few free blocks; nothing was taken.
        """

    @abstractmethod
    def ingest(self, role: str, model: Model, blocks: Any, tokens: Sequence[int], chunk: int) -> torch.Tensor | None:
        """Feed the first tokens of a row into blocks that `reserve` returned, `chunk` at a time; logits [1, V] after the last one."""

    @abstractmethod
    def put_cache(self, role: str, blocks: Any, values: Mapping[str, torch.Tensor]) -> None:
        """Write the first tokens of a row into blocks that `reserve` returned: each entry's [num_layers, length, *shape]."""

    @abstractmethod
    def rewind(self) -> None:
        """Note that the next step may write where older states still read."""

    @abstractmethod
    def put_rows(self, rows: Sequence[int], values: Mapping[str, Any], blocks: Mapping[str, Sequence[Any]]) -> None:
        """Write whole rows of the fields.

        Args:
            rows: row numbers.
            values: by field, one entry for each of the rows; block tables are not among them.
            blocks: by role, what `reserve` returned for each of the rows, or None to let go of a row's blocks.
        """


__all__ = ["Kind", "Transition", "Window"]
