"""What the target writes, and its hidden states on the way: all that a draft is trained on."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from funcspec.errors import ModelError, refuse
from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
from funcspec.models import ForwardBatch
from funcspec.models.llama import Llama
from funcspec.noise import TARGET, split_seed

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Passage:
    """Texts of equal length that were written together.

    Attributes:
        tokens: [B, T] int32.
        counts: [B, T] whether the target wrote the token itself, before it had ended its text.
        states: by layer, [B, T - 1, H]: the target's hidden state of every token but the last, in the target's dtype.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    states: dict[int, torch.Tensor]


@torch.no_grad()
def write(target: Llama, prompts: torch.Tensor, new: int, temperature: torch.Tensor, layers: tuple[int, ...], seed: int) -> Passage:
    """Let the target continue prompts, all rows at once.

    Args:
        target: the model.
        prompts: [B, P] int32 token ids.
        new: tokens to write.
        temperature: [B] float32, 0 is greedy.
        layers: hidden states to keep.
        seed: of the first row; the next ones count up.

    Returns:
        a passage of P + new tokens, in which everything after the prompt counts.

    Raises:
        ModelError: the target has fewer positions.
    """
    rows, start = prompts.shape
    length, device = start + new, prompts.device
    if length > target.max_len:
        refuse("new", f"texts of at most {target.max_len} tokens", f"{start} + {new}", "write shorter texts", ModelError)
    blocks = -(-length // BLOCK_SIZE)
    table = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
    spec = target.kv_spec
    kv = {
        entry.name: torch.zeros((spec.num_layers, rows * blocks, BLOCK_SIZE, *entry.shape), dtype=entry.dtype, device=device)
        for entry in spec.entries
    }
    tokens = torch.cat([prompts, prompts.new_zeros(rows, new)], 1)
    states = {layer: torch.empty(rows, length - 1, target.hidden_size, dtype=target.dtype, device=device) for layer in layers}
    choose = _chooser(target, rows, temperature, seed, device)
    at = 0
    for stop in range(start, length):
        width = stop - at
        positions = torch.arange(at, stop, dtype=torch.int32, device=device).repeat(rows)
        slots = (table[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, dtype=torch.int32, device=device)).view(rows, -1)
        batch = ForwardBatch(
            tokens[:, at:stop].flatten().contiguous(),
            positions,
            torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=device),
            torch.full((rows,), stop, dtype=torch.int32, device=device),
            slots[:, at:stop].flatten().contiguous(),
            table,
            torch.arange(width - 1, rows * width, width, dtype=torch.int32, device=device),
            width,
            layers,
        )
        _, logits, hidden = target.forward(kv, batch)
        for layer, found in zip(layers, hidden, strict=True):
            states[layer][:, at:stop] = found.view(rows, width, -1)
        tokens[:, stop] = choose(logits, stop - 1)
        at = stop
    counts = torch.zeros_like(tokens, dtype=torch.bool)
    counts[:, start:] = True
    return Passage(tokens, counts, states)


def _chooser(
    target: Llama, rows: int, temperature: torch.Tensor, seed: int, device: torch.device
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """A function that draws the next token of each row, with the library's own exact noise."""
    seeds = torch.tensor([split_seed(seed + row) for row in range(rows)], dtype=torch.int32, device=device)
    owners = torch.arange(rows, dtype=torch.int32, device=device)
    shape = (rows, choose_tokens_partials(target.vocab_size))
    scores, best, bad = (torch.zeros(shape, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32, torch.int32))

    def choose(logits: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.zeros((2, rows), dtype=torch.int32, device=device)
        choose_tokens_(
            logits=logits,
            logits_indices=None,
            token_rows=owners,
            positions=torch.full((rows,), position, dtype=torch.int32, device=device),
            temperature=temperature,
            seed=seeds,
            stream=TARGET,
            nonce_length=None,
            token_ids=None,
            out_tokens=out[0],
            out_bad=out[1],
            scratch_scores=scores,
            scratch_tokens=best,
            scratch_bad=bad,
        )
        return out[0]

    return choose


@dataclass(frozen=True)
class Source:
    """A way to begin texts.

    Attributes:
        name: for the log.
        prompts: from a number of rows and a seed to [rows, P] int32.
        temperatures: what the rows are written at, in turns.
        turns: how many end tokens a text may have before it is over.
    """

    name: str
    prompts: Callable[[int, int], torch.Tensor]
    temperatures: tuple[float, ...]
    turns: int = 1


def passages(
    target: Llama,
    sources: tuple[Source, ...],
    *,
    rows: int,
    new: int,
    layers: tuple[int, ...],
    end_tokens: tuple[int, ...],
    seconds: float,
    most: int,
) -> Iterator[Passage]:
    """Write passages from the sources in turns, until the time or their number is up.

    Args:
        target: the model.
        sources: where texts begin.
        rows, new: texts that are written together, and tokens of each.
        layers: hidden states to keep.
        end_tokens: ids with which the target ends a text; what it writes after one does not count.
        seconds: time for all of them.
        most: most passages.
    """
    started, device = time.monotonic(), target.device
    for number in range(most):
        source = sources[number % len(sources)]
        prompts = source.prompts(rows, number).to(device)
        heat = torch.tensor(source.temperatures, device=device).repeat(-(-rows // len(source.temperatures)))[:rows]
        passage = write(target, prompts, new, heat, layers, seed=number * rows)
        ends = torch.isin(passage.tokens[:, prompts.shape[1] :], torch.tensor(end_tokens, dtype=torch.int32, device=device)).long()
        ended = ends.cumsum(1) - ends  # the end token itself still counts
        passage.counts[:, prompts.shape[1] :] = ended < source.turns
        yield passage
        if time.monotonic() - started > seconds:
            return
