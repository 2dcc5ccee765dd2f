"""Decoding of SmolLM2-135M with its two-layer draft: funcspec eager and captured, against plain decoding and transformers."""

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import funcspec as fs
from benchmarks.comparison import Result, measure, print_results
from benchmarks.decoding import Rounds, Settings, Way, own_name, own_ways
from benchmarks.efficiency import measure_efficiency, print_efficiency
from benchmarks.jax_rounds import jax_way
from benchmarks.prompts import prompt_tokens
from benchmarks.timing import on_gpu
from funcspec import graphs
from funcspec.models import smollm2
from funcspec.models.base import Model
from funcspec.models.llama import Llama

PEERS = ("plain", "static", "assisted")
AIMS = "aims: at most 60, slope at most 1"
COUNTED_ROUNDS = 100


def find_peers(settings: Settings, target: Model, draft: Model, drafts: tuple[int, ...], kinds: tuple[str, ...]) -> list[Way]:
    """The peers that can be imported here; says in a line if there are none."""
    if not kinds:
        return []
    try:
        from benchmarks import peers
    except (ImportError, RuntimeError) as error:
        print(f"no peer: transformers cannot be imported ({(str(error).strip() or type(error).__name__).splitlines()[0]})")
        return []
    print("transformers: the same weights; its assistant is the draft with the whole embedding as its head, as vocabularies must be equal")
    return peers.peer_ways(settings, target, draft, drafts, kinds)


def launch_times(results: list[Result], drafts: Sequence[int]) -> dict[str, float]:
    """Host microseconds to launch a captured round, by number of drafts, and what one draft more adds."""
    by_name = {result.name: result for result in results}
    found = {count: by_name[own_name(count, captured=True)].host_us or 0.0 for count in drafts}
    slope = statistics.linear_regression(list(found), list(found.values())).slope if len(found) > 1 else 0.0
    return {f"K={count}": time for count, time in found.items()} | {"slope": slope}


def count_waits_and_allocations(rounds: Rounds, prompt: list[int]) -> dict[str, Any]:
    """Run captured rounds, their verdicts on the way to the host, where waiting is an error; count what was allocated."""
    rounds.admit(prompt)
    state, arrival = rounds.state, graphs.HostVerdict(rounds.config)
    state, verdict = rounds.step(state)
    arrival.copy(verdict)
    torch.cuda.synchronize()
    waits, before = "none", torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(COUNTED_ROUNDS):
                state, verdict = rounds.step(state)
                arrival.copy(verdict)
        except RuntimeError as error:
            waits = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    return {"rounds": COUNTED_ROUNDS, "waits": waits, "allocations": allocations}


def compare_ways(
    settings: Settings,
    target: Model,
    drafter: fs.drafters.Standalone,
    prompts: list[list[int]],
    peer_drafts: tuple[int, ...] = (),
    peers: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Measure all ways to decode; print what was found, and return it.

    Args:
        settings: what to decode.
        target, drafter: the models.
        prompts: token ids of each prompt.
        peer_drafts: numbers of drafts for assisted generation.
        peers: which of `PEERS` to try.
    """
    captured = on_gpu(settings.device)
    if not captured:
        names = "; ".join(own_name(drafts, captured=True) for drafts in (0, *settings.drafts))
        print(f"left out, as they need a GPU: {names}; host time of launches; waits and allocations")
    # Another way to decode is one more value in this list.
    ways = own_ways(settings, target, drafter)
    ways += [jax_way(settings, target, drafter, drafts) for drafts in (0, *peer_drafts)] if isinstance(target, Llama) else []
    ways += find_peers(settings, target, drafter.model, peer_drafts, peers)
    results = measure(ways, prompts, settings.repeats)
    print_results(results, len(prompts))
    efficiency = measure_efficiency(results, settings, target, drafter.model, len(prompts[0]))
    print_efficiency(efficiency, captured=captured)
    found: dict[str, Any] = {"ways": [asdict(result) for result in results], "efficiency": efficiency}
    if captured:
        launches = found["launch_us"] = launch_times(results, settings.drafts)
        listed = ", ".join(f"{name} {time:.1f}" for name, time in launches.items())
        print(f"\nhost time to launch a captured round, us: {listed} a draft ({AIMS})")
        drafts = settings.drafts[len(settings.drafts) // 2]
        counts = count_waits_and_allocations(Rounds(settings, target, drafter, drafts, captured=True), prompts[0])
        found["counts"] = counts
        print(f"{counts['rounds']} captured rounds of K={drafts}: waits: {counts['waits']}; allocations: {counts['allocations']}")
    return found


def run(
    settings: Settings, dtype: torch.dtype, prompts_of_a_kind: int, peer_drafts: tuple[int, ...], peers: tuple[str, ...]
) -> dict[str, Any]:
    """The section: load the pair and the prompts, then `compare_ways`."""
    target = smollm2.load_target(dtype, settings.device)
    drafter = fs.drafters.standalone(*smollm2.load_draft(target))
    kinds = prompt_tokens(smollm2.load_tokenizer(), prompts_of_a_kind)
    described = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in kinds.items())
    print(f"{dtype}, greedy, batch 1; prompts: {described}; at most {settings.max_tokens} new tokens for each", flush=True)
    prompts = [prompt for of_kind in kinds.values() for prompt in of_kind]
    return compare_ways(settings, target, drafter, prompts, peer_drafts, peers)
