"""Make a draft say what its target says."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.distil.corpus import Passage
from examples.distil.students import Guesses, Student

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
) -> dict[str, object]:
    """Train a student in place, against the target's own next-token probabilities.

    Args:
        student: what to train.
        passages: what the target wrote.
        norm_layer: the target's normalised hidden state, which its logits are made of.
        matrix: [V, H] the target's output matrix.
        ids: [N] the tokens that the draft may foresee.
        settings: how long and how fast.

    Returns:
        steps, tokens seen, seconds, and the loss of the last tenth of the steps: its mean, and by draft.
    """
    trained = {name: torch.nn.Parameter(value) for name, value in student.parameters.items()}
    matrices = [value for value in trained.values() if value.ndim > 1]
    others = [value for value in trained.values() if value.ndim == 1]
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
        states = {layer: passage.states[layer][chosen].to(device) for layer in {*student.layers, norm_layer}}
        cuts = draw_cuts(counts, student.cuts, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            guesses = student.guesses(trained, tokens, states, cuts)
            weight = 0.0 if spent < 0.5 else settings.variation
            loss = compare(guesses, states[norm_layer], counts, matrix, rows, ids, weight)
        optimizer.zero_grad(set_to_none=True)
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        seen += counts.sum().item()
        step += 1
        losses.append(loss.detach())
        if step == 1 or step % 200 == 0:
            print(f"  step {step}, loss {float(losses[-1].mean()):.4f}, {seen} tokens, {time.monotonic() - started:.0f} s", flush=True)
    student.parameters.update({name: value.detach() for name, value in trained.items()})
    last = torch.stack(losses[-max(len(losses) // 10, 1) :]).mean(0)
    took = time.monotonic() - started
    return {"steps": step, "tokens": seen, "seconds": took, "loss": float(last.mean()), "loss_by_draft": last.tolist()}


def draw_cuts(counts: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """[B, number] places of tokens whose next one counts, drawn alike from each text's own; of a text that has none, any."""
    upto = counts.cumsum(1)
    drawn = torch.rand(len(counts), number, generator=generator).to(counts.device) * upto[:, -1:]
    return (torch.searchsorted(upto, drawn.long(), right=True) - 1).clamp(0, counts.shape[1] - 2)


def compare(
    guesses: Sequence[Guesses],
    final: torch.Tensor,
    counts: torch.Tensor,
    matrix: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    variation: float,
) -> torch.Tensor:
    """How far guesses are from what the target said of the same tokens.

    Args:
        guesses: of the drafts.
        final: [B, T - 1, H] the target's normalised hidden states, of which that of each token made the next one.
        counts: [B, T] which tokens are compared.
        matrix: [V, H] the target's output matrix.
        rows: [N, H] its rows of the tokens that the draft may foresee.
        ids: [N] these tokens.
        variation: weight of the total variation against the cross-entropy.

    Returns:
        [len(guesses)] mean losses of the tokens that count.
    """
    length, text = counts.shape[1], torch.arange(len(counts), device=counts.device)[:, None]
    said, foreseen = [], []
    for guess in guesses:
        places = guess.places.expand(len(counts), -1)
        counted = counts[text, places.clamp(max=length - 1)] & (places < length)
        said.append(guess.states[counted])
        foreseen.append((text * length + places)[counted])
    needed, where = torch.cat(foreseen).unique(return_inverse=True)
    told = _probabilities(final[needed // length, needed % length - 1], matrix, ids)
    losses = []
    for states, told_rows in zip(said, where.split([len(states) for states in said]), strict=True):
        pieces = zip(states.split(CHUNK), told_rows.split(CHUNK), strict=True)
        parts = [checkpoint(_piece, piece, told, chosen, rows, variation, use_reentrant=False) for piece, chosen in pieces]
        losses.append(torch.stack(parts).sum() / max(len(states), 1))
    return torch.stack(losses)


@torch.no_grad()
def _probabilities(states: torch.Tensor, matrix: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[N, len(ids)] the target's probabilities of the tokens that the draft may foresee; they need not sum to 1."""
    pieces = [F.linear(piece.to(matrix.dtype), matrix).float().softmax(-1)[:, ids.long()] for piece in states.split(CHUNK)]
    return torch.cat(pieces).to(matrix.dtype)


def _piece(said: torch.Tensor, told: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor, variation: float) -> torch.Tensor:
    """Summed over positions: (1 - v) times the cross-entropy to the target, plus v times the total variation."""
    draft, target = F.linear(said.to(rows.dtype), rows).float().log_softmax(-1), told[chosen]
    loss = -(target * draft).sum()
    if variation:
        loss = (1 - variation) * loss + variation * (1 - torch.minimum(target, draft.exp()).sum(-1)).sum()
    return loss
