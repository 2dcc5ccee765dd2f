"""The pieces of `python -m benchmarks`: what they compute, not how long anything takes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of the installed package

import benchmarks
import funcspec as fs
from benchmarks import __main__ as command
from benchmarks import calibration, comparison, efficiency, prompts, smollm2, speculation_cpu
from benchmarks.comparison import Result, first_difference, summarise, warm_up
from benchmarks.decoding import Decoded, Rounds, RoundTimes, Settings, Way, own_ways
from funcspec.models.llama import Llama, LlamaConfig, random_llama

SHAPE = LlamaConfig(
    vocab_size=97,
    num_layers=3,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_len=256,
    rope_theta=500.0,
)
PROMPTS = [[5, 6, 7], [40, 2, 9, 9], [1] * 20]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def with_head(model: Llama, rows: int = 97, ids: torch.Tensor | None = None) -> Llama:
    """A head of its own: with a random embedding as the head, a random Llama repeats what it reads."""
    head = torch.randn(97, 64, generator=torch.Generator().manual_seed(5))[:rows].to(model.device)
    return Llama(model.config, {**model.weights, "head": head}, ids)


def pair(device: str = "cpu") -> tuple[Llama, Llama]:
    """A random target, and its first layer as a draft that agrees with it now and then."""
    target = with_head(random_llama(SHAPE, 0, device=device))
    return target, Llama(replace(SHAPE, num_layers=1), target.weights)


def settings(device: str = "cpu", drafts: tuple[int, ...] = (1, 3)) -> Settings:
    return Settings(device, drafts, max_tokens=20, max_model_len=96, stop_ids=(96,), rounds=4, repeats=2)


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    pytest.importorskip("transformers", minversion="5", exc_type=ImportError)
    from benchmarks import peers

    return peers


def test_both_users_share_the_prompts() -> None:
    assert speculation_cpu.prompt_tokens is smollm2.prompt_tokens is prompts.prompt_tokens
    tokenizer = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[ord(letter) for letter in text]))
    kinds = prompts.prompt_tokens(tokenizer)
    assert {kind: len(of_kind) for kind, of_kind in kinds.items()} == {"text": 5, "chat": 5}
    assert {len(ids) for ids in kinds["text"]} == {prompts.TEXT_TOKENS}
    for question, ids in zip(prompts.CHAT, kinds["chat"], strict=True):
        assert question in "".join(map(chr, ids)) and "".join(map(chr, ids)).endswith("assistant\n")
    assert prompts.prompt_tokens(tokenizer, 2) == {kind: of_kind[:2] for kind, of_kind in kinds.items()}


def test_calibration_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = calibration.calibrate("cpu", 2**16)
    assert set(found) == set(calibration.LABELS) - set(calibration.GPU_ONLY) and min(found.values()) > 0
    calibration.print_calibration(found)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(found) + 1 and printed[-1].startswith("left out, as they need a GPU")


@gpu
@pytest.mark.gpu
def test_calibration_on_a_gpu() -> None:
    found = calibration.calibrate("cuda", 2**20)
    assert set(found) == set(calibration.LABELS) and min(found.values()) > 0


def test_own_ways_give_the_output_of_generate() -> None:
    target, draft = pair()
    drafter = fs.drafters.standalone(draft)
    chosen = settings()
    config = fs.SpecConfig(1, 96, 0, fs.rules.greedy)
    ways = own_ways(chosen, target, drafter)
    assert [way.name for way in ways] == ["funcspec plain, eager", "funcspec K=1, eager", "funcspec K=3, eager"]
    for prompt in [*PROMPTS, PROMPTS[0]]:
        emissions = fs.generate(config, target, None, [prompt], max_tokens=20, stop_ids=[96])
        expected = [token for emission in emissions for token in emission.tokens]
        for way in ways:
            found = way.decode(prompt)
            assert found.tokens == expected and found.counted == len(expected) - 1 and found.seconds > 0
            least = -(-found.counted // ((way.drafts or 0) + 1))
            assert least <= found.rounds <= found.counted and (way.drafts or found.rounds == found.counted)


def test_timed_rounds_are_live() -> None:
    target, draft = pair()
    rounds = Rounds(settings(), target, fs.drafters.standalone(draft), 3, captured=False)
    for prompt in ([5], [1] * 70):  # room for many rounds, and for few
        assert rounds.time_rounds(prompt).device_ms > 0
        assert fs.any_active(rounds.state)


def test_predicted_speedup_and_efficiency(monkeypatch: pytest.MonkeyPatch) -> None:
    assert efficiency.predicted_speedup(2.4, drafts=3, draft_ms=0.1, verify_ms=1.2, plain_ms=1.0) == pytest.approx(1.6)
    assert efficiency.predicted_speedup(1.0, drafts=0, draft_ms=9.0, verify_ms=2.0, plain_ms=2.0) == 1.0
    monkeypatch.setattr(efficiency, "time_passes", lambda target, draft, config, context: (0.2, 2.4))
    results = [
        Result("funcspec plain, eager", 1.0, 100.0, 2.0, False),
        Result("funcspec K=1, eager", 1.5, 110.0, 2.8, False),
        Result("funcspec K=3, eager", 2.4, 144.0, 3.4, False),
    ]
    one, three = efficiency.measure_efficiency(results, settings(), *pair(), 10)
    assert one["draft_ms_from_rounds"] is None and three["draft_ms_from_rounds"] == pytest.approx(0.3)
    assert three["predicted"] == pytest.approx(1.6) and three["measured"] == pytest.approx(1.44)
    assert three["efficiency"] == pytest.approx(0.9) and three["drafts"] == 3


def test_passes_alone_have_the_shapes_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the models are fed in a round, against what is timed alone."""
    target, draft = pair()
    seen: list[tuple[object, ...]] = []
    forward = Llama.forward

    def watched(self: Llama, kv: object, batch: object) -> object:
        indices = None if batch.logits_indices is None else batch.logits_indices.shape
        shapes = (batch.input_ids.shape, batch.block_tables.shape, batch.seq_lens.shape, tuple(batch.query_start_loc.tolist()), indices)
        seen.append((self.config.num_layers, *shapes, batch.max_query_len, kv["key"].shape[2:], batch.input_ids.dtype))
        return forward(self, kv, batch)

    rounds = Rounds(settings(), target, fs.drafters.standalone(draft), 3, captured=False)
    rounds.admit([5, 6, 7])
    monkeypatch.setattr(Llama, "forward", watched)
    rounds.run(1)
    in_a_round, seen[:] = list(seen), []
    efficiency.time_passes(target, draft, rounds.config, 4)
    assert len(in_a_round) == 4 and set(seen) == set(in_a_round)


def test_results() -> None:
    assert first_difference([1, 2], [1, 2]) is None and first_difference([1, 2], [1, 3, 4]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2 and first_difference([], [1]) == 0
    runs = [
        [Decoded([1] * 7, 6, 3, seconds) for seconds in (0.5, 9.0, 1.0)],
        [Decoded([2] * 5, 4, 1, seconds) for seconds in (1.0, 1.0, 0.1)],
    ]
    wall = summarise("a", runs, None)
    assert (wall.tokens_per_round, wall.tokens_per_second, wall.ms_per_round, wall.is_wall) == (2.5, 5.0, 500.0, True)
    timed = summarise("b", runs, RoundTimes(1.5, 40.0, 30.0))
    assert (timed.ms_per_round, timed.host_us, timed.least_host_us, timed.is_wall) == (1.5, 40.0, 30.0, False)
    timed.compare([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]])
    assert (timed.same, timed.tokens, timed.same_tokens, timed.first_differences) == (1, 5, 4, {1: 1})


def test_a_peer_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(prompt: list[int]) -> Decoded:
        raise RuntimeError("no compiler\nand more")

    fine = Way("ours", lambda prompt: Decoded([1, 2], 1, 1, 0.1), drafts=0)
    other = Way("other", lambda prompt: Decoded([1, 3], 1, 1, 0.1))
    assert warm_up([fine, Way("peer", fail), other], [5]) == [fine, other]
    printed = capsys.readouterr().out
    assert "left out: peer: RuntimeError: no compiler\n" in printed and "other differs from ours at token 1 of 2" in printed
    with pytest.raises(RuntimeError, match="no compiler"):
        warm_up([fine, Way("ours too", fail, drafts=1)], [5])


def test_the_section_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as on a machine without it
    monkeypatch.delitem(sys.modules, "benchmarks.peers", raising=False)
    monkeypatch.delattr(benchmarks, "peers", raising=False)
    target, draft = pair()
    found = smollm2.compare_ways(settings(), target, fs.drafters.standalone(draft), PROMPTS, (3,), smollm2.PEERS)
    plain, one, three, *_ = found["ways"]
    assert plain["ratio"] == 1.0 == plain["tokens_per_round"] and plain["host_us"] is None
    assert 1 < one["tokens_per_round"] <= 2 and 1 < three["tokens_per_round"] <= 4
    assert all(way["same"] == len(PROMPTS) and way["tokens"] == way["same_tokens"] for way in found["ways"])
    assert [row["drafts"] for row in found["efficiency"]] == [1, 3] and "counts" not in found
    json.dumps(found)
    printed = capsys.readouterr().out
    assert "left out, as they need a GPU: funcspec plain, captured; funcspec K=1, captured" in printed
    assert "no peer: transformers cannot be imported" in printed


@gpu
@pytest.mark.gpu
def test_the_section_on_a_gpu() -> None:
    target, draft = pair("cuda")
    found = smollm2.compare_ways(settings("cuda"), target, fs.drafters.standalone(draft), PROMPTS)
    assert [way["name"] for way in found["ways"]][:2] == ["funcspec plain, captured", "funcspec K=1, captured"]
    assert len(found["ways"]) == 7 and all(way["same"] == len(PROMPTS) and way["host_us"] > 0 for way in found["ways"])
    assert found["counts"] == {"rounds": smollm2.COUNTED_ROUNDS, "waits": "none", "allocations": 0}
    assert set(found["launch_us"]) == {"K=1", "K=3", "slope"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "numbers.json"
    monkeypatch.setattr(command.smollm2, "run", lambda *arguments: {"got": repr(arguments)})
    command.main(["--device", "cpu", "--drafts", "3", "1", "--peers", "--json", str(file)])
    found = json.loads(file.read_text())
    assert set(found) == {"machine", "options", "calibration", "smollm2"} and torch.__version__.startswith(found["machine"]["torch"])
    assert "drafts=(1, 3)" in found["smollm2"]["got"] and "torch.float32, 3, (3,), ())" in found["smollm2"]["got"]
    for bad in (["nothing"], ["--rounds", "0"], ["--prompts", "6"]):
        with pytest.raises(SystemExit):
            command.parse(bad)
    assert "no section nothing" in capsys.readouterr().err


@pytest.mark.parametrize("head", ["tied", "own", "reduced"])
def test_conversion_to_transformers(peers: ModuleType, head: str) -> None:
    tied = random_llama(SHAPE, 3)
    model = {"tied": tied, "own": with_head(tied), "reduced": with_head(tied, 10, torch.arange(10, dtype=torch.int32))}[head]
    whole = tied if head == "reduced" else model  # the embedding takes the place of a reduced head
    converted = peers.hugging_face_model(model)
    _, logits, _ = efficiency.one_pass(whole, fs.SpecConfig(1, 96, 0, fs.rules.greedy), 0, 30, all_logits=True)()
    with torch.no_grad():
        found = converted(torch.arange(30)[None]).logits[0]
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    assert converted.model.rotary_emb.inv_freq.dtype == torch.float32


def test_bfloat16_keeps_rotary_frequencies(peers: ModuleType) -> None:
    converted = peers.hugging_face_model(random_llama(SHAPE, 3, torch.bfloat16))
    assert converted.dtype == torch.bfloat16 and converted.model.rotary_emb.inv_freq.dtype == torch.float32


def test_transformers_give_our_tokens(peers: ModuleType) -> None:
    target, draft = pair()
    chosen = settings()
    expected = [own_ways(chosen, target, fs.drafters.standalone(draft))[0].decode(prompt).tokens for prompt in PROMPTS]
    ways = peers.peer_ways(chosen, target, draft, (1, 3), smollm2.PEERS)
    assert len(ways) == 4 and len(set(map(tuple, expected))) == len(PROMPTS)
    for way in ways:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            found = way.decode(prompt)
            assert found.tokens == tokens, way.name
            assert 0 < found.rounds <= found.counted < len(tokens)
            most = int(way.name[-1]) + 1 if "assisted" in way.name else 1  # tokens a round
            assert found.counted <= most * found.rounds
            assert most > 1 or found.counted == len(tokens) - 1
    for way, most in zip(peers.peer_ways(chosen, target, target, (1, 3), ("assisted",)), (2, 4), strict=True):
        found = way.decode(PROMPTS[0])  # every draft is right, so the number of drafts shows
        assert found.tokens == expected[0] and found.counted > (most - 1) * found.rounds and found.counted <= most * found.rounds
    stopping = replace(chosen, stop_ids=(expected[0][5],))
    for way in peers.peer_ways(stopping, target, draft, (3,), smollm2.PEERS):
        assert way.decode(PROMPTS[0]).tokens == expected[0][: expected[0].index(expected[0][5]) + 1]
    assert comparison.measure(ways, PROMPTS, 1)[0].same == len(PROMPTS)
