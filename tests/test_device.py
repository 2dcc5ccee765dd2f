"""On a GPU: the same values as on the CPU, no synchronisation, no allocation but the info record."""

import pytest
import torch
from oracle import checksum_greedy, config, output, run

import funcspec as fs
from funcspec.models import ChecksumDraft, ChecksumModel
from funcspec.models.llama import LlamaConfig, random_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[5, 6, 7], [1], [40, 2, 9, 9]]


def start(device: str, rule: fs.rules.Rule, spread: bool) -> tuple[fs.SpecState, ChecksumModel, fs.drafters.Standalone]:
    target, drafter = ChecksumModel(spread=spread), fs.drafters.standalone(ChecksumDraft(spread=spread))
    state = fs.init(config(rows=4, block_size=4, rule=rule, device=device, num_blocks=400), target, drafter)
    temperature = [0.0, 0.7, 1.3] if rule.samples else 0.0
    state, _ = fs.admit(state, target, drafter, PROMPTS, seeds=[1, -2, 3], temperature=temperature, max_tokens=30)
    return state, target, drafter


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("rule", [fs.rules.greedy, fs.rules.coupled])
def test_every_small_buffer_equals_the_cpus(rule: fs.rules.Rule, spread: bool, donate: bool) -> None:
    states = [start(device, rule, spread) for device in ("cpu", "cuda")]
    wanted = [3, 1, 0, 2]
    for number in range(12):
        fields = []
        for index, (state, target, drafter) in enumerate(states):
            stepped, verdict = fs.step_round(state, target, drafter, num_draft=wanted[number % 4 :] + wanted[: number % 4], donate=donate)
            states[index] = (stepped, target, drafter)
            fields.append((fs.snapshot(stepped).fields, verdict.origin.cpu(), verdict.num_accepted.cpu()))
        for name, values in fields[0][0].items():
            assert (fields[1][0][name] == values).all(), name
        assert torch.equal(fields[0][1], fields[1][1]) and torch.equal(fields[0][2], fields[1][2])


def test_old_states_and_branches() -> None:
    state, target, drafter = start("cuda", fs.rules.greedy, False)
    history = [state]
    for _ in range(4):
        drafting, _ = fs.prefill(history[-1], drafter)
        drafting, _ = fs.decode(drafting, drafter)
        history += [drafting, fs.verify(drafting, target)[0]]
    for old in history:
        finished = old if old.lease.phase == "round start" else fs.verify(old, target)[0]
        finished = run(finished, target, drafter, 3)
        for row, prompt in enumerate(PROMPTS):
            assert output(finished, row) == checksum_greedy(prompt, len(output(finished, row)))
    assert fs.snapshot(fs.restore(fs.snapshot(history[3]))) == fs.snapshot(history[3])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_donated_round_neither_waits_nor_allocates() -> None:
    shape = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_len=512
    )
    target, drafter = random_llama(shape, 0, device="cuda"), fs.drafters.standalone(random_llama(shape, 1, device="cuda"))
    for rule, temperature in ((fs.rules.greedy, 0.0), (fs.rules.coupled, 0.8)):
        state = fs.init(config(rows=2, length=512, rule=rule, device="cuda"), target, drafter)
        state, _ = fs.admit(state, target, drafter, [[5, 6, 7], [1]], seeds=[1, 2], temperature=temperature)
        state = run(state, target, drafter, 3, donate=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                state, verdict = fs.step_round(state, target, drafter, donate=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert int(verdict.num_emitted.sum()) >= 2
        assert torch.cuda.memory_allocated() <= before + 16384
