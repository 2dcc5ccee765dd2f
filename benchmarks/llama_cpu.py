"""Cost of one CPU pass of the default pair, against its matrix products alone.

    python -m benchmarks.llama_cpu [--threads 2] [--context 96] [--rounds 30]

Rounds are interleaved; the least and the median time of each pass are printed, in milliseconds. "products" are the same matrix
products on inputs that are ready, each with the code that the model uses; "one-row" is the plain one-row product, `F.linear`, the usual
baseline for plain decoding; "attention" is the paged attention and cache writes of all layers. Needs the target's weights:
`funcspec.models.smollm2.INSTALL`.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from funcspec.kernels.kv_cache import write_kv_
from funcspec.kernels.paged_attention import paged_attention_
from funcspec.models import smollm2
from funcspec.models.base import ForwardBatch
from funcspec.models.llama import Llama
from funcspec.models.products import ROWS, product

BLOCK_SIZE = 16


def make_batch(num_tokens: int, context: int) -> ForwardBatch:
    """`num_tokens` tokens of one row behind `context` cached ones."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    places = list(range(context, context + num_tokens))
    blocks = list(range(-(-(context + num_tokens) // BLOCK_SIZE)))
    return ForwardBatch(
        input_ids=ints([1000 + place for place in places]),
        positions=ints(places),
        query_start_loc=ints([0, num_tokens]),
        seq_lens=ints([context + num_tokens]),
        slot_mapping=ints(places),
        block_tables=ints(blocks)[None],
        logits_indices=None,
        max_query_len=num_tokens,
    )


def make_cache(model: Llama, length: int) -> dict[str, torch.Tensor]:
    """A cache with room for `length` tokens, filled with noise."""
    spec = model.kv_spec
    blocks = -(-length // BLOCK_SIZE)
    return {entry.name: torch.randn(spec.num_layers, blocks, BLOCK_SIZE, *entry.shape) for entry in spec.entries}


def matrices(model: Llama) -> list[torch.Tensor]:
    """Every matrix that a pass multiplies by."""
    found = [weight for name, weight in model.weights.items() if weight.dim() == 2 and name not in ("embed", "head")]
    return [*found, model.weights.get("head", model.weights["embed"])]


def products(model: Llama, num_tokens: int, one_row: bool = False) -> Callable[[], object]:
    """The products of one pass and nothing else."""
    weights = matrices(model)
    rows = num_tokens if one_row else max(num_tokens, ROWS)
    inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in weights}}
    if one_row:
        return lambda: [F.linear(inputs[weight.shape[1]], weight) for weight in weights]
    prepared = [product(weight) for weight in weights]
    return lambda: [multiply(inputs[multiply.weight.shape[1]]) for multiply in prepared]


def attention(model: Llama, kv: dict[str, torch.Tensor], batch: ForwardBatch) -> Callable[[], object]:
    """Cache writes and attention of one pass."""
    config, count = model.config, batch.input_ids.shape[0]
    query = torch.randn(count, config.num_heads, config.head_dim)
    new = torch.randn(count, config.num_kv_heads, config.head_dim)
    out = torch.empty_like(query)

    def run() -> None:
        for layer in range(config.num_layers):
            key, value = kv["key"][layer], kv["value"][layer]
            write_kv_(out_key_cache=key, out_value_cache=value, key=new, value=new, slot_mapping=batch.slot_mapping)
            paged_attention_(
                out=out,
                query=query,
                key_cache=key,
                value_cache=value,
                block_tables=batch.block_tables,
                seq_lens=batch.seq_lens,
                query_start_loc=batch.query_start_loc,
                positions=batch.positions,
                scale=0.125,
                max_query_len=count,
            )

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Cost of one CPU pass of the default pair.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = smollm2.load_target()
    draft, _ = smollm2.load_draft(target)
    cases: dict[str, Callable[[], object]] = {}
    for name, model in (("target", target), ("draft", draft)):
        kv = make_cache(model, options.context + 16)
        for num_tokens in (1, 4, 5, 8):
            batch = make_batch(num_tokens, options.context)
            label = f"{name} T={num_tokens}"
            cases[f"{label} pass"] = lambda model=model, kv=kv, batch=batch: model.forward(kv, batch)
            cases[f"{label} products"] = products(model, num_tokens)
            if num_tokens == 1:
                cases[f"{label} products, one-row"] = products(model, 1, one_row=True)
            cases[f"{label} attention"] = attention(model, kv, batch)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    print(f"{options.threads} threads, context {options.context}, {options.rounds} rounds; least and median in ms")
    for name, taken in times.items():
        print(f"{name:34s} {min(taken):8.2f} {statistics.median(taken):8.2f}")


if __name__ == "__main__":
    main()
