"""A loop that runs ahead of the host: it schedules a round before it knows what the last one accepted.

The host reads every verdict one round late, so it drops finished rows late, takes new requests in between, and lays out each batch anew.
Counts of computed tokens live on the device in the order of the batch, and `update_num_computed_tokens_for_batch_change_` puts them
right when the order changes: they must always be those that the state itself holds.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from oracle import checksum_greedy, config, pair

import funcspec as fs
from funcspec.kernels.batch_change import update_num_computed_tokens_for_batch_change_

ROWS, DRAFTS = 6, 3


@dataclass
class Scheduler:
    """What the host knows: a round late.

    Attributes:
        order: requests in the order of the newest batch.
        known: committed length of each request, as far as verdicts were read.
        counts: [rows] int32 on the device: computed tokens by place in the batch.
        accepted: [rows] int32 on the device: tokens that each place's last round emitted.
    """

    order: list[int] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)
    counts: torch.Tensor = field(default_factory=lambda: torch.full((ROWS,), -1, dtype=torch.int32))
    accepted: torch.Tensor = field(default_factory=lambda: torch.zeros(ROWS, dtype=torch.int32))

    def lay_out(self, order: list[int], emitted: torch.Tensor, drafted: list[int]) -> None:
        """Move the counts to a new order of requests.

        Args:
            order: requests of the next batch.
            emitted: [requests of the last batch] int32 on the device, which nobody has read yet.
            drafted: how many drafts each of these was scheduled with.
        """
        places = {request: place for place, request in enumerate(self.order)}
        # Who had no drafts got one token, which the host can count; for others its number is out of date, and must not be used.
        counted = [self.known[request] - 1 + (request in places) for request in order]
        update_num_computed_tokens_for_batch_change_(
            num_computed_tokens=self.counts,
            num_accepted_tokens=self.accepted[: len(order)],
            prev_positions=torch.tensor([places.get(request, -1) for request in order], dtype=torch.int32),
            valid_sampled_token_count=emitted,
            prev_num_draft_tokens=torch.tensor(drafted, dtype=torch.int32),
            cpu_num_computed_tokens=torch.tensor(counted, dtype=torch.int32),
        )
        self.order = order


@pytest.mark.parametrize("seed", range(4))
def test_counts_on_the_device_are_right_although_the_host_is_late(seed: int) -> None:
    target, drafter = pair()
    rng = np.random.default_rng(seed)
    state = fs.init(config(ROWS, 48, DRAFTS), target, drafter)
    prompts = [rng.integers(0, 97, int(rng.integers(1, 8))).tolist() for _ in range(12)]
    lengths, waiting = rng.integers(4, 24, 12).tolist(), list(range(12))
    host, row_of, done, stale = Scheduler(), {}, {}, 0
    unread: tuple[list[int], fs.Verdict] | None = None
    emitted, drafted = torch.zeros(0, dtype=torch.int32), []
    while waiting or row_of:
        order = [request for request in host.order if request in row_of]
        while waiting and len(row_of) < ROWS and rng.random() < 0.7:
            request = waiting.pop(0)
            state, taken = fs.admit(state, target, drafter, [prompts[request]], max_tokens=lengths[request], donate=True)
            row_of[request], host.known[request] = taken.rows[0], len(prompts[request]) + 1
            order.append(request)
        rng.shuffle(order)
        host.lay_out(order, emitted, drafted)
        # Held against the state, which the loop itself does not look at.
        right = [int(state.num_tokens[row_of[request]]) - 1 for request in order]
        assert host.counts[: len(order)].tolist() == right
        stale += sum(host.known[request] - 1 != count for request, count in zip(order, right, strict=True))
        wanted = [0] * ROWS
        drafted = [int(rng.integers(0, DRAFTS + 1)) for _ in order]
        for request, count in zip(order, drafted, strict=True):
            wanted[row_of[request]] = count
        state, verdict = fs.step_round(state, target, drafter, num_draft=wanted, donate=True)
        emitted = verdict.num_emitted[torch.tensor([row_of[request] for request in order], dtype=torch.int64)]
        for request in unread[0] if unread is not None else ():  # only now the verdict of the round before is read
            if request not in row_of:
                continue
            row = row_of[request]
            host.known[request] += int(unread[1].num_emitted[row])
            if int(unread[1].finish_reason[row]):
                done[request] = state.tokens[row, : host.known[request]].tolist()
                state = fs.release(state, [row_of.pop(request)], donate=True)
        unread = (order, verdict)
    assert stale > 50
    assert done == {request: prompts[request] + checksum_greedy(prompts[request], lengths[request]) for request in range(12)}
