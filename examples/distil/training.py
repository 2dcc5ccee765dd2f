"""Make a draft say what its target says."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.distil.corpus import Passage
from examples.distil.students import Student

CHUNK = 4096
"""Positions whose logits are in memory at a time."""


@dataclass(frozen=True)
class Settings:
    """How long and how fast to train.

    Attributes:
        seconds: time in all.
        steps: most steps, 0 for as many as the time allows.
        batch: texts in a step.
        learning_rate: its highest value; it rises over 50 steps and then falls as a cosine to a twentieth.
        variation: weight of the total variation in the second half, against the cross-entropy.
        seed: of the order of texts.
    """

    seconds: float
    steps: int = 0
    batch: int = 64
    learning_rate: float = 1e-3
    variation: float = 0.5
    seed: int = 0


def most_frequent(passages: Sequence[Passage], vocab_size: int, count: int) -> torch.Tensor:
    """[count] int32 ids of the tokens that the target writes most often, most frequent first; ties go to the lowest id."""
    seen = sum(torch.bincount(passage.tokens[passage.counts].long(), minlength=vocab_size) for passage in passages)
    assert isinstance(seen, torch.Tensor)
    return seen.argsort(descending=True, stable=True)[:count].to(torch.int32)


def train(
    student: Student, passages: Sequence[Passage], norm_layer: int, matrix: torch.Tensor, ids: torch.Tensor, settings: Settings
) -> dict[str, float]:
    """Train a student in place, against the target's own next-token probabilities.

    Args:
        student: what to train.
        passages: what the target wrote.
        norm_layer: the target's normalised hidden state, which its logits are made of.
        matrix: [V, H] the target's output matrix.
        ids: [N] the tokens that the draft may foresee.
        settings: how long and how fast.

    Returns:
        steps, tokens seen, seconds, and the mean loss of the last tenth of the steps.
    """
    trained = {name: torch.nn.Parameter(value) for name, value in student.parameters.items()}
    matrices = [value for value in trained.values() if value.ndim == 2]
    others = [value for value in trained.values() if value.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(settings.seed)
    device, rows = matrix.device, matrix[ids.long()]
    started, step, seen, losses = time.monotonic(), 0, 0, []
    while True:
        spent = max((time.monotonic() - started) / settings.seconds, step / settings.steps if settings.steps else 0.0)
        if spent >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * spent)))
        passage = passages[int(torch.randint(len(passages), (1,), generator=generator))]
        chosen = torch.randint(len(passage.tokens), (settings.batch,), generator=generator).to(passage.tokens.device)
        tokens, counts = passage.tokens[chosen].to(device), passage.counts[chosen].to(device)
        states = {layer: values[chosen].to(device) for layer, values in passage.states.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            outs = student.hidden(trained, tokens, states)
            weight = 0.0 if spent < 0.5 else settings.variation
            loss = _loss(outs, student.lag, states[norm_layer], counts, matrix, rows, ids, weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        seen += counts.sum().item()
        step += 1
        losses.append(loss.detach())
        if step == 1 or step % 200 == 0:
            print(f"  step {step}, loss {float(losses[-1]):.4f}, {seen} tokens, {time.monotonic() - started:.0f} s", flush=True)
    student.parameters.update({name: value.detach() for name, value in trained.items()})
    last = torch.stack(losses[-max(len(losses) // 10, 1) :]).mean()
    return {"steps": step, "tokens": seen, "seconds": time.monotonic() - started, "loss": float(last)}


def _loss(
    outs: Sequence[torch.Tensor],
    lag: int,
    final: torch.Tensor,
    counts: torch.Tensor,
    matrix: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    variation: float,
) -> torch.Tensor:
    """Mean loss of all draft steps: index i of a step foresees token i + 1 + lag, as row i + lag of the target's states does."""
    total = final.new_zeros((), dtype=torch.float32)
    wanted = counts[:, 1 + lag :]
    place = wanted.nonzero()[:, 1]
    told = _probabilities(final[:, lag:][wanted], matrix, ids)
    for step, out in enumerate(outs):
        said = out[:, : wanted.shape[1]][wanted]
        started = place >= step  # before, the step's chain has not begun
        said, target = said[started], told[started]
        for at in range(0, len(said), CHUNK):
            part = checkpoint(_piece, said[at : at + CHUNK], target[at : at + CHUNK], rows, variation, use_reentrant=False)
            total = total + part / max(len(said), 1) / len(outs)
    return total


@torch.no_grad()
def _probabilities(states: torch.Tensor, matrix: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[N, len(ids)] the target's probabilities of the tokens that the draft may foresee; they need not sum to 1."""
    pieces = [F.linear(piece.to(matrix.dtype), matrix).float().softmax(-1)[:, ids.long()] for piece in states.split(CHUNK)]
    return torch.cat(pieces).to(matrix.dtype) if pieces else matrix.new_zeros(0, len(ids))


def _piece(said: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, variation: float) -> torch.Tensor:
    """Summed over positions: (1 - v) times the cross-entropy to the target, plus v times the total variation."""
    draft = F.linear(said.to(rows.dtype), rows).float().log_softmax(-1)
    loss = -(target * draft).sum()
    if variation:
        loss = (1 - variation) * loss + variation * (1 - torch.minimum(target, draft.exp()).sum(-1)).sum()
    return loss
