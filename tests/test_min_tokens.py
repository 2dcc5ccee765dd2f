"""A least number of tokens: until then no stop id comes, under every rule, drafted or not."""

import pytest
import torch
from oracle import checksum_greedy
from tokenizers import Tokenizer, decoders, models

import funcspec as fs
from funcspec.errors import ArgumentError
from funcspec.models import ChecksumDraft, ChecksumModel
from funcspec.text import TextStream

PROMPT = [5, 6, 7]
GREEDY = [39, 1, 6, 42, 45, 17, 73, 27, 33, 41, 89, 74, 20, 49, 9, 74]


def tabled() -> fs.models.TableModel:
    """A target that looks at the newest token alone and likes the tokens 4 and 5 best."""
    weights = torch.rand(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.1
    weights[:, 4:] *= 8
    return fs.models.TableModel(tuple(map(tuple, (weights / weights.sum(1, keepdim=True)).tolist())))


def outputs(model: object, drafter: object, rule: object, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    config = fs.SpecConfig(max_num_reqs=2, max_model_len=48, num_speculative_tokens=3 if drafter else 0, rule=rule)
    found: list[list[int]] = [[] for _ in prompts]
    for emission in fs.generate(config, model, drafter, prompts, seeds=list(range(len(prompts))), **settings):
        found[emission.prompt_index] += emission.tokens
    return found


def test_a_stop_id_counts_from_the_first_token_that_may_stop() -> None:
    drafter = fs.drafters.standalone(ChecksumDraft())
    stop = [GREEDY[3]]
    settings = {"stop_ids": stop, "max_tokens": 16}
    for minimum in range(4):
        assert outputs(ChecksumModel(), drafter, fs.rules.greedy, [PROMPT], min_tokens=minimum, **settings) == [GREEDY[:4]]
    # From 4 on the stop id may not come as the fourth token, so the best of the others does.
    (longer,) = outputs(ChecksumModel(), drafter, fs.rules.greedy, [PROMPT], min_tokens=4, **settings)
    assert longer[:3] == GREEDY[:3]
    assert longer[3] != GREEDY[3]
    assert stop[0] not in longer[:4]


@pytest.mark.parametrize("rule", [fs.rules.greedy, fs.rules.coupled, fs.rules.ratio], ids=repr)
@pytest.mark.parametrize("drafts", ["standalone", "ngram"])
def test_it_is_decoding_with_the_stop_ids_forbidden(rule: fs.rules.Rule, drafts: str) -> None:
    target = tabled()
    drafter = fs.drafters.ngram() if drafts == "ngram" else fs.drafters.standalone(tabled())
    temperature = 0.0 if rule is fs.rules.greedy else 1.0
    settings = {"temperature": temperature, "stop_ids": [4, 5], "max_tokens": 20}
    prompts = [[1, 2], [3], [0, 1, 0]]
    found = outputs(target, drafter, rule, prompts, min_tokens=[0, 5, 11], **settings)
    for minimum, tokens in zip((0, 5, 11), found, strict=True):
        assert not {4, 5} & set(tokens[:minimum])
        assert len(tokens) >= max(minimum, 1)
        assert tokens[-1] in (4, 5) or len(tokens) == 20
        assert not {4, 5} & set(tokens[:-1])
    if rule is not fs.rules.ratio:
        assert found == outputs(target, None, rule, prompts, min_tokens=[0, 5, 11], **settings)


def test_the_law_is_the_target_s_without_the_stop_ids() -> None:
    """2,000 rows with different seeds: two tokens against the target without ids 4 and 5; false alarms 1 in 1,000 for each."""
    row = (0.01, 0.02, 0.03, 0.04, 0.5, 0.4)
    target, draft = (fs.models.TableModel((weights,) * 6, max_len=16) for weights in (row, row[::-1]))
    count = 2000
    config = fs.SpecConfig(
        max_num_reqs=count, max_model_len=8, num_speculative_tokens=2, rule=fs.rules.ratio, num_blocks=count, allows_min_tokens=True
    )
    drafter = fs.drafters.standalone(draft)
    state = fs.init(config, target, drafter)
    state, _ = fs.admit(
        state, target, drafter, [[1]] * count, seeds=list(range(count)), temperature=1.0, min_tokens=3, max_tokens=4, stop_ids=[4, 5]
    )
    state, _ = fs.step_round(state, target, drafter)
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4]) * count
    for place in (1, 2):
        seen = torch.bincount(state.tokens[:, place].long(), minlength=6).float()
        assert seen[4:].sum() == 0
        statistic = float(((seen[:4] - expected) ** 2 / expected).sum())
        assert statistic < 16.27  # chi-square, three degrees of freedom, 0.999 quantile


def test_states_keep_it_through_forks_snapshots_and_other_frameworks() -> None:
    target = tabled()
    config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy, allows_min_tokens=True)
    state, first = fs.admit(fs.init(config, target), target, None, [[1]], min_tokens=6, stop_ids=[4, 5])
    assert state.min_len.tolist() == [7]
    assert first.tokens[0] not in (4, 5)
    for branch in (fs.fork(state), fs.restore(fs.snapshot(state))):
        while fs.any_active(branch):
            branch, _ = fs.verify(branch, target)
        tokens = branch.tokens[0, 1 : int(branch.num_tokens[0])].tolist()
        assert not {4, 5} & set(tokens[:6])
        assert tokens[6] in (4, 5)


def test_a_model_s_own_logits_are_left_alone() -> None:
    kept = torch.randn(1, 97)
    before = kept.clone()

    class Same(ChecksumModel):
        def forward(self, kv: object, batch: fs.models.ForwardBatch) -> tuple[object, torch.Tensor, tuple[()]]:
            count = batch.input_ids.shape[0] if batch.logits_indices is None else batch.logits_indices.shape[0]
            return kv, kept.expand(count, -1), ()

    stops = [int(before.argmax())]
    (tokens,) = outputs(Same(), None, fs.rules.greedy, [[1]], min_tokens=4, stop_ids=stops, max_tokens=8)
    assert torch.equal(kept, before)
    assert stops[0] not in tokens[:4]
    assert tokens[4:] == stops


def test_stop_strings_wait_too() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "ab": 2, "c": 3}, unk_token="c"))
    tokenizer.decoder = decoders.Fuse()
    for minimum, kept, text in ((0, 2, ""), (1, 2, ""), (2, 3, "ab"), (3, 5, "abab")):
        stream = TextStream(tokenizer, ["ab"], min_tokens=minimum)
        piece = stream.add([0, 1, 2, 0, 1, 3])
        assert (piece.kept, piece.text, piece.stopped) == (kept, text, True)
    # A string that began before the minimum and ends after it counts.
    stream = TextStream(tokenizer, ["bc"], min_tokens=2)
    assert (stream.add([0, 1, 3]).text, stream.add([0]).kept) == ("a", 0)
    # One that was over before does not, however it goes on.
    stream = TextStream(tokenizer, ["ab", "abab"], min_tokens=2)
    assert stream.add([0, 1, 3, 3]).text + stream.finish() == "abcc"


def test_it_is_refused_where_it_cannot_be_kept() -> None:
    target = ChecksumModel()
    config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy)
    state = fs.init(config, target)
    before = fs.snapshot(state)
    with pytest.raises(ArgumentError, match=r"min_tokens.*allows_min_tokens=True"):
        fs.admit(state, target, None, [PROMPT], min_tokens=2)
    able = fs.init(config.replace(allows_min_tokens=True), target)
    for wrong in (-1, True, 1.5, "2", [1, 2]):
        with pytest.raises(ArgumentError, match="min_tokens"):
            fs.admit(able, target, None, [PROMPT], min_tokens=wrong)
    with pytest.raises(ArgumentError, match=r"min_tokens.*max_tokens"):
        fs.admit(able, target, None, [PROMPT], min_tokens=5, max_tokens=4)
    with pytest.raises(ArgumentError, match="min_tokens"):
        fs.generate(config, target, None, [PROMPT], min_tokens=-2)
    with pytest.raises(TypeError, match="allows_min_tokens"):
        config.replace(allows_min_tokens=1)
    assert fs.snapshot(state) == before
    assert checksum_greedy(PROMPT, 4) == GREEDY[:4]


@pytest.mark.jax_on_cpu
def test_states_of_jax_keep_it_too() -> None:
    target = tabled()
    settings = {"temperature": 1.0, "stop_ids": [4, 5], "max_tokens": 12, "min_tokens": [6, 3]}
    lifted = fs.interop.jax_model(target)
    assert outputs(lifted, None, fs.rules.coupled, [[1], [2]], **settings) == outputs(
        target, None, fs.rules.coupled, [[1], [2]], **settings
    )
