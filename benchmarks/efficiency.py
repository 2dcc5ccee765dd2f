"""How close rounds come to what their models' passes allow."""

from collections.abc import Callable

import torch

import funcspec as fs
from benchmarks.comparison import Result
from benchmarks.decoding import Settings, own_name
from benchmarks.timing import device_seconds, on_gpu, record
from funcspec.models.base import ForwardBatch, Model


def predicted_speedup(tokens_per_round: float, drafts: int, draft_ms: float, verify_ms: float, plain_ms: float) -> float:
    """Speed-up over plain decoding if a round cost its passes and nothing else.

    Reference: Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8, with a verifying pass that may cost more than a plain one.
    """
    return tokens_per_round / ((drafts * draft_ms + verify_ms) / plain_ms)


def one_pass(model: Model, config: fs.SpecConfig, context: int, width: int, *, all_logits: bool) -> Callable[[], object]:
    """A forward as a round runs it at batch 1: `width` places behind `context` cached tokens, in a cache of its own."""
    device, spec, blocks = config.device, model.kv_spec, config.blocks_per_row
    kv = {
        entry.name: torch.zeros((spec.num_layers, blocks, config.block_size, *entry.shape), dtype=entry.dtype, device=device)
        for entry in spec.entries
    }

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = range(context, context + width)
    batch = ForwardBatch(
        input_ids=ints(*(place % model.vocab_size for place in range(width))),
        positions=ints(*positions),
        query_start_loc=ints(0, width),
        seq_lens=ints(context + width),
        slot_mapping=ints(*positions),  # blocks in their order, so slots are positions
        block_tables=ints(*range(blocks))[None],
        logits_indices=None if all_logits or width == 1 else ints(width - 1),
        max_query_len=width,
    )
    return lambda: model.forward(kv, batch)


def pass_ms(model: Model, config: fs.SpecConfig, context: int, width: int, *, all_logits: bool = False) -> float:
    """Milliseconds of `one_pass`: in a CUDA graph of its own on a GPU, else called."""
    call = one_pass(model, config, context, width, all_logits=all_logits)
    if on_gpu(config.device):
        return device_seconds(record(call), config.device) * 1e3
    return device_seconds(call, config.device, batch=2, repeats=5) * 1e3


def time_passes(target: Model, draft: Model, config: fs.SpecConfig, context: int) -> tuple[float, float]:
    """Milliseconds of a draft pass, the mean over a round (K + 1 places in the first, then one), and of the verifying pass."""
    drafts = config.num_speculative_tokens
    first = pass_ms(draft, config, context, drafts + 1)
    following = pass_ms(draft, config, context, 1) if drafts > 1 else 0.0
    return (first + (drafts - 1) * following) / drafts, pass_ms(target, config, context, drafts + 1, all_logits=True)


def measure_efficiency(
    results: list[Result], settings: Settings, target: Model, draft: Model, context: int
) -> list[dict[str, float | None]]:
    """For each number of drafts: passes alone, the speed-up they would allow, the measured one and the quotient of the two."""
    by_name = {result.name: result for result in results}
    captured = on_gpu(settings.device)
    plain, found = by_name[own_name(0, captured)], []
    fewer: tuple[int, float] | None = None
    for drafts in settings.drafts:
        result = by_name[own_name(drafts, captured)]
        config = fs.SpecConfig(1, settings.max_model_len, drafts, fs.rules.greedy, device=settings.device)
        draft_ms, verify_ms = time_passes(target, draft, config, context)
        predicted = predicted_speedup(result.tokens_per_round, drafts, draft_ms, verify_ms, plain.ms_per_round)
        measured = result.tokens_per_second / plain.tokens_per_second
        row = {
            "drafts": drafts,
            "draft_ms": draft_ms,
            "draft_ms_from_rounds": None if fewer is None else (result.ms_per_round - fewer[1]) / (drafts - fewer[0]),
            "verify_ms": verify_ms,
            "round_ms": result.ms_per_round,
            "plain_ms": plain.ms_per_round,
            "predicted": predicted,
            "measured": measured,
            "efficiency": measured / predicted,
        }
        found.append(row)
        fewer = drafts, result.ms_per_round
    return found


def print_efficiency(found: list[dict[str, float | None]], *, captured: bool) -> None:
    """Print a line for each number of drafts."""
    kind, passes = ("captured", "in graphs of their own") if captured else ("eager", "called alone")
    print(f"\nwhat the passes allow ({kind} rounds; passes {passes}; ms)")
    titles = ("K", "draft", "by slope", "verify", "round", "plain", "predicted", "measured", "efficiency")
    print("".join(f"{title:>11}" for title in titles))
    for row in found:
        numbers = (f"{value:11.3f}" if isinstance(value, float) else f"{'-' if value is None else value:>11}" for value in row.values())
        print("".join(numbers))
    print("by slope: a draft pass as (round(K) - round(K')) / (K - K'), with K' of the line above, wider verifying pass and all")
    print("predicted: tokens/round over (K draft + verify) / plain; measured: tokens/s over plain; efficiency: measured / predicted")
