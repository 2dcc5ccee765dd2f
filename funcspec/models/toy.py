"""Small models whose every number is known: for tests, examples and for seeing how a model is written.

`ChecksumModel` makes every KV mistake visible: its next token is a checksum of what it reads back from its own paged cache.
`TableModel` has exactly known next-token probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from funcspec.errors import check_int, refuse
from funcspec.models.base import KV, ForwardBatch, KVEntry, KVSpec

_TOKEN_CACHE = KVSpec(1, (KVEntry("token", (), torch.int32), KVEntry("position", (), torch.int32)))


def write_tokens(kv: KV, batch: ForwardBatch) -> None:
    """Store ids and positions of the batch in a token cache; places with slot -1 write nothing."""
    real = batch.slot_mapping >= 0
    slots = batch.slot_mapping[real].long()
    kv["token"].view(-1)[slots] = batch.input_ids[real]
    kv["position"].view(-1)[slots] = batch.positions[real]


def read_prefixes(kv: KV, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read back, through the block tables, what each wanted token of the batch may see.

    Returns:
        tokens [M, S] and positions [M, S] as stored, and visible [M, S]: whether key position s is seen.
    """
    count = batch.input_ids.shape[0]
    device = batch.input_ids.device
    wanted = torch.arange(count, device=device) if batch.logits_indices is None else batch.logits_indices.long()
    rows = torch.searchsorted(batch.query_start_loc[1:].contiguous(), wanted.int(), right=True)
    size = kv["token"].shape[2]
    keys = torch.arange(batch.block_tables.shape[1] * size, device=device)
    blocks = batch.block_tables[rows].repeat_interleave(size, 1)
    last = torch.minimum(batch.positions[wanted], batch.seq_lens[rows] - 1)
    visible = (keys <= last[:, None]) & (batch.seq_lens[rows] > 0)[:, None]
    slots = torch.where(visible & (blocks >= 0), blocks * size + keys % size, 0).long()
    return kv["token"].view(-1)[slots], kv["position"].view(-1)[slots], visible


@dataclass(frozen=True)
class ChecksumModel:
    """next(sequence) = (1 + sum of (position + 1) * token) mod vocab_size, read back from its own paged cache.

    Attributes:
        vocab_size: number of tokens.
        max_len: longest sequence.
        spread: False puts all weight on the next token; True spreads it, exactly and reproducibly, for sampling.
    """

    vocab_size: int = 97
    max_len: int = 4096
    spread: bool = False

    @property
    def kv_spec(self) -> KVSpec:
        """Each slot keeps a token id and its position."""
        return _TOKEN_CACHE

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Write the batch's tokens, then answer from what the cache holds."""
        write_tokens(kv, batch)
        tokens, positions, visible = read_prefixes(kv, batch)
        total = ((positions.long() + 1) * tokens.long() * visible).sum(1)
        return kv, self._logits(self._answer((1 + total) % self.vocab_size)), ()

    def _answer(self, token: torch.Tensor) -> torch.Tensor:
        return token

    def _logits(self, token: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(self.vocab_size, device=token.device)
        away = (ids - token[:, None]) % self.vocab_size
        # Multiples of 1/8 are exact in every float format; 5 * away scatters them over the vocabulary.
        return 1.0 * (away == 0) - ((5 * away) % self.vocab_size) / 8.0 if self.spread else -100.0 * (away != 0)


@dataclass(frozen=True)
class ChecksumDraft(ChecksumModel):
    """A draft for `ChecksumModel` with its own cache: right unless the right token is divisible by 3, then one too high."""

    def _answer(self, token: torch.Tensor) -> torch.Tensor:
        return torch.where(token % 3 == 0, (token + 1) % self.vocab_size, token)


@dataclass(frozen=True)
class TableModel:
    """Next-token probabilities by the newest token alone, from a table. Needs no cache.

    Attributes:
        probabilities: one row of next-token probabilities for each token.
        max_len: longest sequence.

    Example:
        >>> model = TableModel(((0.25, 0.75), (1.0, 0.0)))
        >>> model.vocab_size
        2
    """

    probabilities: tuple[tuple[float, ...], ...]
    max_len: int = 4096
    log_table: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table: Sequence[Sequence[float]] = self.probabilities
        try:  # written so that NaN fails too
            fits = len(table) > 0 and all(len(row) == len(table) and min(row) >= 0 and abs(sum(row) - 1) <= 1e-6 for row in table)
        except TypeError:
            fits = False
        if not fits:
            refuse("probabilities", "a square table whose rows are distributions", repr(table), "give every token one row that sums to 1")
        check_int("max_len", self.max_len, 1)
        object.__setattr__(self, "log_table", torch.tensor(table, dtype=torch.float64).log().float())

    @property
    def vocab_size(self) -> int:
        """Rows of the table."""
        return len(self.probabilities)

    @property
    def kv_spec(self) -> KVSpec:
        """Nothing is cached."""
        return KVSpec(0, ())

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Look up the row of each wanted token."""
        ids = batch.input_ids if batch.logits_indices is None else batch.input_ids[batch.logits_indices.long()]
        return kv, self.log_table.to(ids.device)[ids.long()], ()


__all__ = ["ChecksumDraft", "ChecksumModel", "TableModel", "read_prefixes", "write_tokens"]
