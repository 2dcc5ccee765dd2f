"""Time of prompt lookup alone: what `ngram` adds to a round. `python -m benchmarks.lookup [--device cuda]`."""

import argparse
from collections.abc import Callable

import torch

from benchmarks.timing import device_seconds, on_gpu, record
from funcspec.kernels.ngram_lookup import ngram_lookup_
from funcspec.kernels.op import Backend
from funcspec.kernels.place_drafts import place_drafts_

VOCAB_SIZE, DRAFTS = 50_000, 4


def round_of(rows: int, length: int, device: str, backend: Backend | None) -> Callable[[], None]:
    """Look up and place the drafts of full rows of random tokens: the search cannot end early, and half of the rows find something."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (rows, length), generator=generator, dtype=torch.int32)
    n = length - DRAFTS - 1
    tokens[::2, n - 3 : n] = tokens[::2, :3]
    tokens = tokens.to(device)
    by_row = torch.zeros(7, rows, dtype=torch.int32, device=device)
    num_tokens, row_limit, is_live, wanted, counts, num_draft, num_drafted = by_row.unbind()
    for field, value in ((num_tokens, n), (row_limit, length), (is_live, 1), (wanted, DRAFTS)):
        field.fill_(value)
    proposals, drafts = torch.zeros(2, rows, DRAFTS, dtype=torch.int32, device=device).unbind()

    def call() -> None:
        ngram_lookup_(
            tokens=tokens,
            num_tokens=num_tokens,
            is_live=is_live,
            max_ngram=3,
            min_ngram=1,
            window=None,
            latest=False,
            out_proposals=proposals,
            out_counts=counts,
            backend=backend,
        )
        place_drafts_(
            keep_others=False,
            proposals=proposals,
            counts=counts,
            num_tokens=num_tokens,
            row_limit=row_limit,
            is_live=is_live,
            wanted=wanted,
            tokens=tokens,
            num_draft=num_draft,
            num_drafted=num_drafted,
            out_tokens=drafts,
            backend=backend,
        )

    call()
    assert num_drafted[::2].eq(DRAFTS).all()
    return record(call) if on_gpu(device) else call


def main() -> None:
    """Print medians."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = options.parse_args().device
    torch.set_num_threads(1)
    backends: tuple[Backend | None, ...] = (None,) if on_gpu(device) else ("host", "reference")
    for rows, length in ((1, 4096), (64, 4096), (1, 131_072)):
        for backend in backends:
            seconds = device_seconds(round_of(rows, length, device, backend), device)
            print(f"R={rows:2d}, {length} tokens a row, {backend or 'one CUDA graph'}: median {seconds * 1e6:.0f} us a round")


if __name__ == "__main__":
    main()
