"""A target with hidden states and drafts that read them, which notice every feature that is not the right one at its place."""

from dataclasses import dataclass, field, replace

import torch
from oracle import VOCAB

from funcspec.models import ChecksumModel, ForwardBatch, KVEntry, KVSpec
from funcspec.models.base import KV, FeatureSpec
from funcspec.models.toy import read_prefixes, write_tokens


@dataclass(frozen=True)
class FeatureTarget(ChecksumModel):
    """`ChecksumModel` whose hidden state i at a position is (position, token, checksum of the sequence so far) + i."""

    hidden_size: int = 3
    num_layers: int = 2

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        kv, logits, _ = super().forward(kv, replace(batch, hidden_layers=()))
        count = int(batch.query_start_loc[-1])  # places behind those of the last row are nobody's
        tokens, positions, visible = read_prefixes(kv, replace(batch, logits_indices=torch.arange(count)))
        total = 1 + ((positions.long() + 1) * tokens.long() * visible).sum(1)
        states = torch.zeros(len(batch.input_ids), 3)
        states[:count] = torch.stack([batch.positions[:count], batch.input_ids[:count], total % VOCAB], 1)
        return kv, logits, tuple(states + layer for layer in batch.hidden_layers)


@dataclass(frozen=True)
class FeatureDraft(ChecksumModel):
    """A draft that keeps features and tokens ahead in its cache, and answers like `ChecksumDraft` if all of them are right.

    Attributes:
        layers: hidden states of the target that it reads.
        passes: "chain" to hand its own state on, "parallel" to guess several tokens a pass.
        mistakes: one entry for each wrong feature that was read.
    """

    layers: tuple[int, ...] = (0,)
    passes: str = "chain"
    mistakes: list[str] = field(default_factory=list, compare=False)

    @property
    def features(self) -> FeatureSpec:
        size = 3 * len(self.layers)
        return FeatureSpec(self.layers, size, feedback=size if self.passes == "chain" else 0)

    @property
    def kv_spec(self) -> KVSpec:
        entries = [KVEntry("token", (), torch.int32), KVEntry("position", (), torch.int32)]
        return KVSpec(1, (*entries, KVEntry("feature", (3 * len(self.layers),), torch.float32)))

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        write_tokens(kv, batch)
        self._write_features(kv, batch)
        wanted = torch.arange(len(batch.input_ids)) if batch.logits_indices is None else batch.logits_indices.long()
        rows = torch.searchsorted(batch.query_start_loc[1:].contiguous(), wanted.int(), right=True)
        tokens, positions, visible = read_prefixes(kv, batch)
        size = kv["token"].shape[2]
        flat = kv["feature"].view(-1, kv["feature"].shape[-1])
        answers, states = [], []
        for place in range(len(wanted)):
            count = int(visible[place].sum())
            blocks = batch.block_tables[rows[place]].repeat_interleave(size)[:count]
            read = flat[(blocks * size + torch.arange(count) % size).long()]
            answer, state = self._answer_of(tokens[place, :count].tolist(), positions[place, :count].tolist(), read)
            answers.append(answer)
            states.append(state)
        chosen = torch.tensor(answers, dtype=torch.int64)
        return kv, self._logits(chosen), (torch.tensor(states).reshape(len(wanted), self.features.size).float(),)

    def _write_features(self, kv: KV, batch: ForwardBatch) -> None:
        rows = len(batch.seq_lens)
        assert batch.features is not None
        each = len(batch.features) // rows
        places = len(batch.input_ids) // rows
        flat = kv["feature"].view(-1, kv["feature"].shape[-1])
        for row in range(rows):
            for place in range(places):
                slot = int(batch.slot_mapping[row * places + place])
                if slot >= 0:
                    flat[slot] = batch.features[row * each + place] if place < each else -1.0

    def _answer_of(self, ahead: list[int], positions: list[int], features: torch.Tensor) -> tuple[int, list[float]]:
        """Check everything that was read, and answer; also what the target's hidden state of the next position would be."""
        if not ahead:
            return 0, [0.0] * 3 * len(self.layers)
        base = [feature - layer for index, layer in enumerate(self.layers) for feature in features[:, 3 * index : 3 * index + 3].unbind(1)]
        sequence, total = [int(base[1][0]), *ahead], 1
        for position in range(len(ahead)):
            total += (position + 1) * sequence[position]
            right = [position, sequence[position], total % VOCAB] * len(self.layers)
            read = [int(column[position]) for column in base]
            if read != right or positions[position] != position:
                self.mistakes.append(f"position {position}: {read} instead of {right}, cached as {positions[position]}")
        total += len(sequence) * sequence[-1]
        token = total % VOCAB
        state = [float(value + layer) for layer in self.layers for value in (len(ahead), ahead[-1], token)]
        return (token + 1) % VOCAB if token % 3 == 0 else token, state
