"""An open step: the buffers of the next state while they are being written.

A step opens a transition on a state, derives inputs, runs a model, samples and advances, and closes it into a new state. The
state it came from is not touched before the forward has succeeded: if a model raises, the state stays usable, donated or
not. Drafters and rules work on a transition; they never see how purity, donation and copy-on-write are done.
"""

from collections.abc import Sequence

import torch

from funcspec.constants import NO_ROW, NO_TOKEN
from funcspec.errors import ModelError, StepOrderError, refuse
from funcspec.kernels.append_drafts import append_drafts_
from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
from funcspec.kernels.kv_cache import copy_blocks_
from funcspec.kernels.window_inputs import DRAFTED, FEED, VERIFY, window_inputs_
from funcspec.models.base import ForwardBatch, Model
from funcspec.pool import BlockCopies, Branch, Pool
from funcspec.state import DRAFTING, ROUND_START, Buffers, Lease, SpecState, check_state, name_step

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOTHING_TO_WRITE = 2**31 - 1


class Window:
    """Preallocated inputs of passes with `width` places a row. Scratch: refilled at each pass, never part of a state."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        def empty(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.width = width
        self.input_ids = empty(rows * width)
        self.positions = empty(rows * width)
        self.slot_mapping = empty(rows * width)
        self.token_rows = torch.full((rows * width,), NO_ROW, dtype=torch.int32, device=device)
        self.seq_lens = empty(rows)
        self.last_token_indices = empty(rows)
        self.query_start_loc = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=device)


class Choice:
    """Preallocated outputs of one choice of `count` tokens from `vocab_size` logits each. Scratch."""

    def __init__(self, count: int, vocab_size: int, device: str) -> None:
        partials = choose_tokens_partials(vocab_size)
        self.tokens = torch.zeros(count, dtype=torch.int32, device=device)
        self.bad = torch.zeros(count, dtype=torch.int32, device=device)
        self.scores = torch.zeros(count, partials, dtype=torch.float32, device=device)
        self.candidates = torch.zeros(count, partials, dtype=torch.int32, device=device)
        self.flags = torch.zeros(count, partials, dtype=torch.int32, device=device)


class Transition:
    """A step in progress.

    Attributes:
        config: the state's configuration.
        name: the step's name, numbered, for messages.
        fields: the small buffers to read and, after the forward, to write.
        target, draft: the branches as they will be in the new state.
        phase, stamp, draft_steps: where in a round the input state is.
    """

    def __init__(self, state: SpecState, step: str, *, donate: bool) -> None:
        check_state(state, step)
        if not isinstance(donate, bool):
            refuse("donate", "True or False", repr(donate), "pass a bool")
        self.config = state.config
        self.name = name_step(step)
        lease = state.lease
        lease.target.pool.check_thread(step)
        self._lease = lease
        self._donate = donate
        self.target: Branch = lease.target
        self.draft: Branch | None = lease.draft
        self._reuses = donate and lease.buffers.arena is not None
        self.fields: Buffers = lease.buffers if self._reuses else lease.buffers.packed()
        self.known_num_tokens = lease.known_num_tokens
        self.phase, self.stamp, self.draft_steps = lease.phase, lease.stamp, lease.draft_steps
        self._drafts: torch.Tensor | None = None

    def prepare_write(self, role: str) -> None:
        """Make sure the step may write the role's KV: in place for the tip, else into copies of the blocks it will touch.

        Raises:
            PoolExhaustedError: no room for the copies; nothing was written.
        """
        branch = self._branch(role)
        if branch.is_tip:
            return
        prepared, copies = branch.prepare_write(self._first_positions(role))
        if self._reuses:  # the input state must survive a failing forward, so its tables may not change
            self.fields, self._reuses = self._lease.buffers.packed(), False
        if copies is not None:
            self._copy(prepared, copies)
        self.table(role).copy_(prepared.table(self.config.blocks_per_row))
        self._set_branch(role, prepared)

    def window(self, role: str, kind: int, width: int, *, limit: int, all_logits: bool = False) -> tuple[Window, ForwardBatch]:
        """Derive the inputs of a pass of `width` places a row (one kernel).

        Args:
            role: "target" or "draft".
            kind: `FEED`, `DRAFTED` or `VERIFY` of `funcspec.kernels.window_inputs`.
            width: places a row has.
            limit: positions the model can take.
            all_logits: whether logits are wanted everywhere, not only at each row's last token.

        Returns:
            the window and the batch that views it; both are valid until the next pass of that width.
        """
        fields = self.fields
        scratch = self._branch(role).pool.scratch
        key = ("window", width)
        window = scratch.get(key)
        if not isinstance(window, Window):
            window = scratch[key] = Window(self.config.max_num_reqs, width, self.config.device)
        table = self.table(role)
        window_inputs_(
            kind=kind,
            tokens=fields.tokens,
            num_tokens=fields.num_tokens,
            fed_len=fields.draft_len,
            num_draft=fields.num_draft,
            num_drafted=fields.num_drafted,
            is_live=fields.is_live,
            block_tables=table,
            block_size=self.config.block_size,
            width=width,
            limit=limit,
            out_input_ids=window.input_ids,
            out_positions=window.positions,
            out_slot_mapping=window.slot_mapping,
            out_token_rows=window.token_rows,
            out_seq_lens=window.seq_lens,
            out_last_token_indices=window.last_token_indices,
        )
        indices = None if all_logits or width == 1 else window.last_token_indices
        batch = ForwardBatch(
            window.input_ids,
            window.positions,
            window.query_start_loc,
            window.seq_lens,
            window.slot_mapping,
            table,
            indices,
            width,
        )
        return window, batch

    def forward(self, role: str, model: Model, batch: ForwardBatch, count: int) -> torch.Tensor:
        """Run the model on the role's KV and check what it returns.

        Returns:
            logits [count, model.vocab_size].
        """
        return run_model(model, self._branch(role).pool, batch, count)

    def choose(
        self,
        role: str,
        logits: torch.Tensor,
        window: Window,
        batch: ForwardBatch,
        *,
        stream: int,
        nonce_length: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> Choice:
        """Choose a token from each row of logits [M, V]: arg-max at temperature 0, else drawn with the row's exact noise."""
        count, vocab_size = logits.shape
        scratch = self._branch(role).pool.scratch
        key = ("choice", count, vocab_size)
        choice = scratch.get(key)
        if not isinstance(choice, Choice):
            choice = scratch[key] = Choice(count, vocab_size, self.config.device)
        choose_tokens_(
            logits=logits,
            logits_indices=batch.logits_indices,
            token_rows=window.token_rows,
            positions=window.positions,
            temperature=self.fields.temperature,
            seed=self.fields.seed,
            stream=stream,
            nonce_length=nonce_length,
            token_ids=token_ids,
            out_tokens=choice.tokens,
            out_bad=choice.bad,
            scratch_scores=choice.scores,
            scratch_tokens=choice.candidates,
            scratch_bad=choice.flags,
        )
        return choice

    def draft_once(self, model: Model, *, first: bool, token_ids: torch.Tensor | None, wanted: torch.Tensor) -> None:
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
        window, batch = self.window("draft", FEED if first else DRAFTED, width, limit=model.max_len)
        logits = self.forward("draft", model, batch, config.max_num_reqs)
        choice = self.choose("draft", logits, window, batch, stream=config.rule.draft_stream, token_ids=token_ids)
        fields = self.fields
        self._drafts = torch.empty(config.max_num_reqs, config.num_speculative_tokens, dtype=torch.int32, device=config.device)
        append_drafts_(
            first=first,
            chosen=choice.tokens,
            num_tokens=fields.num_tokens,
            row_limit=fields.row_limit,
            is_live=fields.is_live,
            wanted=wanted,
            tokens=fields.tokens,
            num_draft=fields.num_draft,
            num_drafted=fields.num_drafted,
            draft_len=fields.draft_len,
            draft_limit=min(model.max_len, config.max_model_len),
            out_tokens=self._drafts,
        )
        self.advance("draft", guarded=True)

    def drafts(self) -> torch.Tensor:
        """This round's drafts so far, [R, K] int32 of its own, -1 where there is none."""
        if self._drafts is None:  # a drafter that needed no pass in this step
            fields = self.fields
            lane = torch.arange(self.config.num_speculative_tokens, device=self.config.device)
            places = (fields.num_tokens[:, None] + lane).clamp_(max=self.config.max_model_len - 1)
            self._drafts = torch.where(lane < fields.num_drafted[:, None], fields.tokens.gather(1, places.long()), NO_TOKEN)
        return self._drafts

    def score(self, model: Model) -> tuple[Window, ForwardBatch, torch.Tensor]:
        """Run the target over the newest token and the drafts of every row; logits [R * (K + 1), V]."""
        config = self.config
        width = config.num_speculative_tokens + 1
        self.prepare_write("target")
        window, batch = self.window("target", VERIFY, width, limit=config.max_model_len, all_logits=True)
        logits = self.forward("target", model, batch, config.max_num_reqs * width)
        self.advance("target", guarded=True)
        return window, batch, logits

    def wanted(self, num_draft: object) -> torch.Tensor:
        """Turn the number of drafts a caller asks for into [R] int32 on the device.

        Numbers are checked; the values of a tensor are not read, as that would wait for the GPU, and are clipped to 0..K later.
        """
        config = self.config
        most = config.num_speculative_tokens
        if isinstance(num_draft, torch.Tensor):
            if (tuple(num_draft.shape), num_draft.dtype, num_draft.device.type) != (
                (config.max_num_reqs,),
                torch.int32,
                config.device_type,
            ):
                found = f"{list(num_draft.shape)} {num_draft.dtype} on {num_draft.device}"
                expected = f"an int32 tensor [{config.max_num_reqs}] on {config.device}"
                refuse("num_draft", expected, found, "give every row a number")
            return num_draft
        counts = (
            [most if num_draft is None else num_draft] * config.max_num_reqs
            if num_draft is None or isinstance(num_draft, int)
            else num_draft
        )
        if not isinstance(counts, Sequence) or len(counts) != config.max_num_reqs:
            refuse("num_draft", f"an int or {config.max_num_reqs} ints", repr(num_draft), "give one number, or one for each row")
        if any(not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most for count in counts):
            refuse(
                "num_draft",
                f"numbers from 0 to num_speculative_tokens = {most}",
                repr(num_draft),
                "draft fewer or raise the configuration's K",
            )
        if len(set(counts)) > 1:
            return torch.tensor(counts, dtype=torch.int32, device=config.device)
        scratch = self.target.pool.scratch
        key = ("wanted", counts[0])
        found = scratch.get(key)
        if not isinstance(found, torch.Tensor):
            found = scratch[key] = torch.full((config.max_num_reqs,), counts[0], dtype=torch.int32, device=config.device)
        return found

    def close(self, phase: str, *, stamp: object = None, draft_steps: int = 0) -> SpecState:
        """Turn the transition into the new state; a donated input dies here."""
        if phase == ROUND_START and self.draft is not None:
            self.draft = self.draft.release_guard()
        lease = self._lease
        new = Lease(self.fields, self.name, self.target, self.draft, lease.models, self.known_num_tokens, phase, stamp, draft_steps)
        if self._donate:
            lease.kill(self.name)
        return SpecState(self.config, new)

    def table(self, role: str) -> torch.Tensor:
        """Block table [R, N] of a role."""
        return self.fields.block_tables if role == "target" else self.fields.draft_block_tables

    def _branch(self, role: str) -> Branch:
        branch = self.target if role == "target" else self.draft
        if branch is None:
            raise ModelError(
                "drafter: expected the drafter the state was made with, got one for a state without a drafter. Fix: pass it to init."
            )
        return branch

    def advance(self, role: str, *, guarded: bool) -> None:
        """Become the tip of the role's branch after a write."""
        self._set_branch(role, self._branch(role).advance(guarded=guarded))

    def _set_branch(self, role: str, branch: Branch) -> None:
        if role == "target":
            self.target = branch
        else:
            self.draft = branch

    def _first_positions(self, role: str) -> list[int]:
        """Lower bounds of the first position a step writes: exact on the CPU, from what the host knows elsewhere."""
        fields = self.fields
        exact = fields.num_tokens.device.type == "cpu"
        counts = fields.num_tokens.tolist() if exact else list(self.known_num_tokens)
        back = 1 if role == "target" else self.config.num_speculative_tokens + 1
        if exact and role == "draft":
            starts = [min(n, d) for n, d in zip(counts, fields.draft_len.tolist(), strict=True)]
        else:
            starts = [max(n - back, 0) for n in counts]
        if not exact:
            return starts
        return [s if live else NOTHING_TO_WRITE for s, live in zip(starts, fields.is_live.tolist(), strict=True)]

    def _copy(self, branch: Branch, copies: BlockCopies) -> None:
        if not copies.source:
            return
        device = self.config.device
        pairs = torch.tensor([copies.source, copies.destination, copies.rows, copies.block_indices], dtype=torch.int32).to(device)
        lengths = self.fields.num_tokens + self.config.num_speculative_tokens
        for cache in branch.pool.kv.values():
            copy_blocks_(cache=cache, source=pairs[0], destination=pairs[1], rows=pairs[2], block_indices=pairs[3], lengths=lengths)


def revive(state: SpecState, newest: SpecState) -> None:
    """Give a donated state its life back after a failure in mid-round: take over from `newest`, without its drafts."""
    lease = newest.lease
    fields = lease.buffers
    places = torch.arange(fields.tokens.shape[1], device=fields.tokens.device)
    fields.tokens.masked_fill_(places >= fields.num_tokens[:, None], NO_TOKEN)
    fields.num_draft.zero_()
    fields.num_drafted.zero_()
    # The newest token is fed again: drafting goes on from its logits.
    fields.draft_len.copy_(torch.minimum(fields.draft_len, fields.num_tokens - 1).clamp_(min=0))
    target, draft = lease.target, lease.draft.release_guard() if lease.draft is not None else None
    lease.kill("a round that failed")
    state.lease.revive(fields, target, draft)


def run_model(model: Model, pool: Pool, batch: ForwardBatch, count: int) -> torch.Tensor:
    """Run a forward without autograd and check the logits' shape.

    Raises:
        ModelError: the model returned other KV buffers, or logits that are not [count, model.vocab_size] of float32, bfloat16 or float16.
    """
    with torch.no_grad():
        result = model.forward(pool.kv, batch)
    if not isinstance(result, tuple) or len(result) != 3:
        raise ModelError(f"forward: expected (kv, logits, hidden), got {type(result).__name__}. Fix: return the three of them.")
    kv, logits, _ = result
    if kv is not pool.kv and any(kv.get(name) is not buffer for name, buffer in pool.kv.items()):
        raise ModelError("forward: expected the KV buffers it was given, got others. Fix: write to them in place and return them.")
    if not isinstance(logits, torch.Tensor) or logits.shape != (count, model.vocab_size) or logits.dtype not in LOGITS_DTYPES:
        found = f"{tuple(logits.shape)} {logits.dtype}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ModelError(
            f"forward: expected float logits [{count}, {model.vocab_size}], got {found}. "
            "Fix: return logits at batch.logits_indices only (at all tokens if it is None), as a float32, bfloat16 or float16 tensor."
        )
    return logits


__all__ = ["DRAFTING", "Choice", "Transition", "Window", "run_model"]
