"""An open step as the frameworks see it: what reads and writes arrays, in torch and in JAX.

The bodies of the steps, in `funcspec.transitions.drafting` and `funcspec.transitions.judging`, are written once on top of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from funcspec.carried import Partner
from funcspec.config import SpecConfig
from funcspec.errors import ModelError
from funcspec.kernels.choose_tokens import choose_tokens_
from funcspec.kernels.op import Op
from funcspec.kernels.rope_positions import rope_positions_
from funcspec.kernels.window_inputs import window_inputs_
from funcspec.models.base import Array, ForwardBatch, Model
from funcspec.noise import DRAFT
from funcspec.state import SpecState
from funcspec.transitions.shapes import Shapes, choice_shapes, rope_shapes, window_shapes

Kind = Literal["an int32", "a float"]
"""Elements of an array that a caller passes; floats are float32, bfloat16 or float16."""

STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Guess:
    """How a pass guesses several tokens of a row at once; see `window_inputs_`.

    Attributes:
        num_masks, mask_id: places behind the window's last token, and the token they hold.
        num_choices, choice_offset: how many tokens are chosen, and from which place behind the window's last token on.
        masks: [R, at least num_masks] int32, guesses of another drafter in place of the mask token, -1 for none; then choices count as long
            as they equal the guesses.
    """

    num_masks: int
    mask_id: int
    num_choices: int
    choice_offset: int = 0
    masks: Array | None = None


@dataclass(frozen=True)
class Window:
    """Inputs of a pass with the same number of places in each row; valid until the step's next pass of that width.

    Attributes:
        batch: what the model is given.
        token_rows: [T] int32, the row of each place, -1 where there is no token.
    """

    batch: ForwardBatch
    token_rows: Array


@dataclass(frozen=True)
class Ingested:
    """What feeding the first tokens of a row gave, as tensors.

    Attributes:
        logits: [1, V] after the last token; None if there were no tokens, or none were asked for.
        features: [len(tokens), F] the wanted hidden states side by side, float32; None if none were wanted.
    """

    logits: torch.Tensor | None
    features: torch.Tensor | None


def check_hidden(hidden: Any, batch: ForwardBatch) -> None:
    """Refuse hidden states that do not fit what was asked for.

    Raises:
        ModelError: not one array [T, H] for each of `batch.hidden_layers`.
    """
    count, wanted = batch.input_ids.shape[0], batch.hidden_layers
    shapes = [tuple(states.shape) for states in hidden] if isinstance(hidden, tuple | list) else type(hidden).__name__
    if not isinstance(shapes, list) or len(shapes) != len(wanted) or any(len(s) != 2 or s[0] != count for s in shapes):
        raise ModelError(
            f"forward: expected hidden states [{count}, H] of the layers {wanted}, got {shapes}. "
            "Fix: return one array for each of batch.hidden_layers, or use a target that can."
        )


def check_states(whose: str, hidden: Any, count: int, shape: tuple[int, int]) -> None:
    """Refuse hidden states that a draft's features cannot be made of.

    Args:
        whose: "target" or "drafter", for the message.
        hidden: what the model returned, of either framework.
        count: how many arrays there have to be.
        shape: shape of each.

    Raises:
        ModelError: fewer arrays, another shape, or elements that are no floats of at most 32 bits.
    """
    states = list(hidden) if isinstance(hidden, tuple | list) else []
    found = [(tuple(getattr(one, "shape", ())), str(getattr(one, "dtype", type(one).__name__)).removeprefix("torch.")) for one in states]
    if len(found) != count or any(size != shape or dtype not in STATE_DTYPES for size, dtype in found):
        raise ModelError(
            f"{whose}: expected {count} hidden states {list(shape)} of {', '.join(STATE_DTYPES)}, got {found}. "
            "Fix: let the model return them, or use the draft that was trained for this target."
        )


class Framework(ABC):
    """A step in progress, without the bodies of the steps.

    Attributes:
        config: the state's configuration.
        name: the step's name, numbered, for messages.
        fields: the small buffers, as attributes by name; read and, after the last forward, written through `run`.
        phase, stamp, draft_steps: where in a round the input state is.
        partners: what the state remembers of its models, by role.
        proposes_points: whether all drafts of the step's drafter are just proposed, whatever they were drawn from.
        drafts_argmax: whether its model's likeliest tokens are drafted, whatever the rows' temperatures.
    """

    config: SpecConfig
    name: str
    fields: Any
    phase: str
    stamp: object
    draft_steps: int
    partners: Mapping[str, Partner]
    proposes_points: bool = False
    drafts_argmax: bool = False

    def window(
        self,
        role: str,
        kind: int,
        width: int,
        *,
        limit: int,
        all_logits: bool = False,
        guess: Guess | None = None,
        shift: int = 0,
        query_only: bool = False,
    ) -> Window:
        """Derive the inputs of a pass of `width` places a row (one kernel).

        Args:
            role: "target" or "draft".
            kind: `FEED`, `DRAFTED` or `VERIFY` of `funcspec.kernels.window_inputs`.
            width: places a row has.
            limit: positions the model can take.
            all_logits: whether logits are wanted everywhere, not only at each row's last token.
            guess: for a pass that guesses several tokens a row.
            shift: 1 to feed at each position the token of the next one.
            query_only: for a draft that reads the target's cache, and writes none.
        """
        fields, config, table = self.fields, self.config, self.table("target" if query_only else role)
        choices = 1 if guess is None else guess.num_choices
        guessing = {} if guess is None else vars(guess)
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
            shift=shift,
            query_only=query_only,
            **guessing,
            **self.scratch(role, window_shapes, config.max_num_reqs, width, choices),
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
            rope_positions=self._turned(role, out["out_token_rows"], out["out_positions"]),
        )
        return Window(batch, out["out_token_rows"])

    def _turned(self, role: str, token_rows: Array, positions: Array) -> Array | None:
        """Rotary positions [A, T], for models that have their own."""
        axes = self.partners[role].rope_axes
        if not axes:
            return None
        out = self.scratch(role, rope_shapes, axes, positions.shape[0])
        table = self.rope_positions()
        return self.run(rope_positions_, table=table, token_rows=token_rows, positions=positions, **out)["out_rope_positions"]

    def choose(
        self,
        role: str,
        logits: Array,
        window: Window,
        *,
        stream: int,
        logits_indices: Array | None = None,
        token_ids: Array | None = None,
        position_offset: int = 0,
        greedy: bool = False,
    ) -> tuple[Array, Array]:
        """Choose a token from each row of logits [M, V]: arg-max at temperature 0, else drawn with the row's exact noise.

        Noise of DRAFT differs from round to round. `logits_indices` [M] int32 may say which place of the window each row of logits is of,
        -1 to choose none; `token_ids` [V] int32 which target ids the columns are. `position_offset` is how far positions lag behind those
        of the tokens they are fed. `greedy` takes the arg-max in every row.

        Returns:
            tokens [M] int32 in target ids, and [M] int32: 1 where logits were not finite or nothing was allowed.
        """
        temperature = self.fields.temperature
        out = self.run(
            choose_tokens_,
            logits=logits,
            logits_indices=window.batch.logits_indices if logits_indices is None else logits_indices,
            token_rows=window.token_rows,
            positions=window.batch.positions,
            temperature=self.constant(0).view(temperature.dtype) if greedy else temperature,
            seed=self.fields.seed,
            stream=stream,
            nonce_length=self.fields.num_tokens if stream == DRAFT else None,
            token_ids=token_ids,
            position_offset=position_offset,
            **self.scratch(role, choice_shapes, *logits.shape),
        )
        return out["out_tokens"], out["out_bad"]

    @property
    def judges_ratios(self) -> bool:
        """Whether the rule asks what the drafts of a round were drawn from."""
        return self.config.rule.judges_by == "ratio" and self.config.num_speculative_tokens > 0

    def table(self, role: str) -> Array:
        """Block table [R, N] of a role."""
        return self.fields.block_tables if role == "target" else self.fields.draft_block_tables

    # What the frameworks do in their own ways.

    @abstractmethod
    def run(self, op: Op, **arguments: Any) -> Mapping[str, Any]:
        """Run an operation. A written argument that is named like a field is that field, and is from now on what was written.

        The same holds for what `proposals` and `features` return.

        Returns:
            the arguments by name, as they are after the operation.
        """

    @abstractmethod
    def scratch(self, role: str, shapes: Callable[..., Shapes], *sizes: int) -> Mapping[str, Array]:
        """Buffers `shapes(*sizes)` of any contents, for use within the step."""

    @abstractmethod
    def scratch_like(self, role: str, array: Array) -> Array:
        """A buffer of an array's shape and dtype and of any contents, for use within the step."""

    @abstractmethod
    def records(self, **shapes: tuple[int, ...]) -> Mapping[str, Array]:
        """New int32 buffers for an info record, which no later step touches."""

    @abstractmethod
    def proposals(self, *, write: bool = False) -> Mapping[str, Array]:
        """What this round's drafts were drawn from, by the names in `funcspec.carried.PROPOSALS`.

        Args:
            write: whether they will be written. To read them, the result may be empty: nothing was drafted.
        """

    @abstractmethod
    def mark_points(self, points: Array) -> None:
        """Note in the proposals which rows' drafts are just proposed: [R] int32, not 0 where they are."""

    @abstractmethod
    def features(self, *, write: bool = False) -> Array:
        """What the draft reads of hidden states, [R, K + 1, F] float32; see `funcspec.carried.carried_layout`.

        Args:
            write: whether they will be written.
        """

    @abstractmethod
    def rope_positions(self) -> Array:
        """Rotary positions [R, A, L] int32 of models that have their own, to read; see `funcspec.carried.carried_layout`."""

    @abstractmethod
    def put_carried(self, rows: Sequence[int], values: Mapping[str, Any]) -> None:
        """Replace rows of what the state carries along.

        Args:
            rows: row numbers.
            values: by name, new values for these rows, of the framework or on the host; of features perhaps only the first places.
        """

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
    def forward(self, role: str, model: Model, batch: ForwardBatch, count: int) -> tuple[Array, tuple[Array, ...]]:
        """Run the model on the role's KV and check what it returns: logits [count, model.vocab_size], and hidden states."""

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
    def ingest(
        self,
        role: str,
        model: Model,
        blocks: Any,
        tokens: Sequence[int],
        chunk: int,
        *,
        layers: tuple[int, ...] = (),
        features: torch.Tensor | None = None,
        rope: np.ndarray | None = None,
    ) -> "Ingested":
        """Feed the first tokens of a row into blocks that `reserve` returned, `chunk` at a time.

        Args:
            role: "target" or "draft".
            model: whose KV it is.
            blocks: blocks of the row.
            tokens: token ids.
            chunk: most tokens in a pass.
            layers: hidden states to return.
            features: [len(tokens), F] what a draft reads besides; then no logits are asked for.
            rope: [A, at least len(tokens)] rotary positions, for models that have their own.
        """

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


__all__ = ["Framework", "Guess", "Ingested", "Kind", "Window", "check_hidden", "check_states"]
