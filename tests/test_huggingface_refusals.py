"""Model directories, and what `huggingface` refuses: by name, with both values and a fix, before anything is changed."""

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import config
from refusals import MESSAGE
from torch import nn

import funcspec as fs
from funcspec.errors import ArgumentTypeError, ModelError
from funcspec.models import huggingface
from funcspec.models.huggingface import load

transformers = pytest.importorskip("transformers", minversion="5", exc_type=ImportError)

from tiny_transformers import COMMON, VOCAB, Cache, draw, make, plain  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402


def refused(lm: Any, message: str, error: type[Exception] = ModelError, **settings: Any) -> None:
    """The model is refused in the library's form, and left as it was."""
    before = copy.deepcopy(lm.config.to_dict()) if isinstance(lm, transformers.PreTrainedModel) else None
    with pytest.raises(error, match=message) as found:
        huggingface(lm, **settings)
    assert MESSAGE.match(str(found.value)), str(found.value)
    assert before is None or lm.config.to_dict() == before


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(ModelError, match=r"^transformers: expected version 5 or later, got 4\.57\.1"):
        huggingface(None)


@pytest.mark.parametrize(
    ("lm", "fix"),
    [
        (None, "AutoModelForCausalLM"),
        ("gpt2", "load it with `load`"),
        (Path("gpt2"), "load it with `load`"),
        (nn.Linear(2, 2), "AutoModelForCausalLM"),
        (torch.zeros(2), "AutoModelForCausalLM"),
    ],
)
def test_what_is_no_model(lm: Any, fix: str) -> None:
    refused(lm, rf"^lm: expected a transformers\.PreTrainedModel, got {re.escape(type(lm).__name__)}\. Fix: .*{fix}", ArgumentTypeError)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from importing torch's compiler
def test_wrappers_around_a_model() -> None:
    class Adapted(nn.Module):
        def merge_and_unload(self) -> None: ...

    refused(Adapted(), r"got Adapted\. Fix: pass lm\.merge_and_unload", ArgumentTypeError)
    refused(torch.compile(make("llama")), r"got OptimizedModule\. Fix: pass the model before torch\.compile", ArgumentTypeError)


@pytest.mark.parametrize("wrong", [1, 0, -3, 65, 10**9])
def test_lengths_that_a_learned_table_does_not_have(wrong: int) -> None:
    for kind in ("gpt2", "opt"):
        refused(make(kind), rf"^max_len: expected 2 to 64 positions of (GPT2LMHeadModel|OPTForCausalLM), got {wrong}\.", max_len=wrong)


@pytest.mark.parametrize("wrong", ["64", 64.0, True])
def test_lengths_that_are_no_ints(wrong: Any) -> None:
    refused(make("gpt2"), r"^max_len: expected an int or None", ArgumentTypeError, max_len=wrong)


def test_rotary_embeddings_have_no_last_position() -> None:
    """A longer row is allowed where it is asked for, and is what transformers computes."""
    lm = make("llama")
    model = huggingface(lm, max_len=100)
    tokens = draw(90)
    cache = Cache(model, 1, 25)
    _, logits, _ = model.forward(cache.kv, cache.batch([(0, tokens)]))
    torch.testing.assert_close(logits, plain(lm, tokens), atol=2e-5, rtol=0)
    assert (model.max_len, huggingface(lm, max_len=10).max_len, huggingface(lm).max_len) == (100, 10, 64)


def test_a_table_that_is_shorter_than_the_configuration_says() -> None:
    lm = make("gpt2")
    lm.config.n_positions = 128
    refused(lm, r"^lm: expected a model that runs at positions 0, 1 and 127, got IndexError: .* Fix: pass a smaller max_len")
    assert huggingface(lm, max_len=64).max_len == 64


@pytest.mark.parametrize("wrong", [torch.float64, torch.int8, torch.float8_e4m3fn, "bfloat16"])
def test_dtypes_of_the_cache(wrong: Any) -> None:
    refused(make("llama"), r"^kv_dtype: expected float32, bfloat16, float16 or None", ArgumentTypeError, kv_dtype=wrong)


def encoder_decoder() -> Any:
    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": VOCAB}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**small))


UNFIT = {
    "encoder and decoder": (encoder_decoder, r"decoder-only model, got T5ForConditionalGeneration, an encoder and a decoder"),
    "no head": (lambda: make("llama").model, r"a language-model head, got LlamaModel"),
    "another head": (
        lambda: transformers.LlamaForSequenceClassification(make("llama").config),
        r"a language-model head, got LlamaForSequenceClassification",
    ),
    "state space": (lambda: make("mamba"), r"\['linear_attention'\] in MambaForCausalLM"),
    "recurrent": (lambda: make("rwkv"), r"position_ids, got RwkvForCausalLM"),
    "recurrent gemma": (
        lambda: make("recurrent_gemma", num_hidden_layers=3),
        r"(linear_attention'\]|3 layers of attention) in RecurrentGemmaForCausalLM",
    ),
    "biases by distance": (lambda: make("bloom"), r"position_ids, got BloomForCausalLM|2 layers of attention in BloomForCausalLM, got 0"),
    "not causal": (lambda: make("bert"), r"causal attention, plain or in a sliding window, got another mask in BertSelfAttention"),
    "chunks": (lambda: make("llama4_text"), r"\['chunked_attention'\] in Llama4ForCausalLM"),
    "masks of its own": (lambda: make("doge"), r"the masks of transformers\.masking_utils, got a mask or bias of its own in DogeAttention"),
    "arguments are dropped": (lambda: make("stablelm"), r"handed on to the attention, got none in StableLmAttention"),
    "two calls a layer": (lambda: make("diffllama"), r"2 layers of attention in DiffLlamaForCausalLM, got 4 calls"),
    "heads too wide": (lambda: make("llama", head_dim=520), r"head_dim of at most 512, got 520 in LlamaAttention"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UNFIT)
def test_models_of_other_kinds(case: str) -> None:
    """B7: models whose cache cannot be gone back in, and others, are refused when they are wrapped."""
    build, message = UNFIT[case]
    refused(build(), rf"^lm: .*({message})")


def test_weights_that_are_elsewhere() -> None:
    refused(make("llama").to("meta"), r"^lm: expected all weights on one device, got meta")
    spread = make("llama")
    spread.lm_head.to("meta")
    refused(spread, r"^lm: expected all weights on one device, got cpu and meta")


def test_more_outputs_than_inputs() -> None:
    lm = make("llama")
    lm.lm_head = nn.Linear(32, VOCAB + 3, bias=False)
    refused(lm, rf"^lm: expected at most as many outputs as its {VOCAB} input ids, got {VOCAB + 3}")
    lm.lm_head = nn.Linear(32, VOCAB - 3, bias=False)
    assert huggingface(lm).vocab_size == VOCAB - 3 and huggingface(lm).input_vocab_size == VOCAB


class Positionless(transformers.LlamaForCausalLM):
    """Takes positions, and counts them by itself."""

    def forward(self, input_ids, position_ids=None, **others):
        return super().forward(input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **others)


class Mixing(transformers.LlamaForCausalLM):
    """Looks at the token before, wherever it comes from."""

    def forward(self, input_ids, **others):
        shifted = torch.cat([input_ids[:, :1], input_ids[:, :-1]], 1)
        embed = self.get_input_embeddings()
        return super().forward(inputs_embeds=embed(input_ids) + embed(shifted), **others)


class Biased(transformers.LlamaForCausalLM):
    """Hands an argument on that would change the attention."""

    def forward(self, input_ids, position_ids=None, **others):
        return super().forward(input_ids=input_ids, position_ids=position_ids, position_bias=torch.ones(1), **others)


class NoLogits(transformers.LlamaForCausalLM):
    def forward(self, input_ids, position_ids=None, **others):
        found = super().forward(input_ids=input_ids, position_ids=position_ids, **others)
        found.logits = found.logits[0]
        return found


class Fails(transformers.LlamaForCausalLM):
    def forward(self, input_ids, position_ids=None, **others):
        raise RuntimeError("no such kernel\nand a long story")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Positionless, r"own tokens and their positions alone, got a change of \d+\.\d% when Positionless reads them in another company"),
        (Mixing, r"takes position_ids, got Mixing, which does not"),
        (Biased, r"attention that is known here, got 'position_bias' from LlamaAttention"),
        (NoLogits, r"float logits \[1, 2, 'vocabulary'\] from NoLogits, got \[2, 97\] torch\.float32"),
        (Fails, r"runs two tokens with position_ids, got RuntimeError from Fails: no such kernel\. Fix"),
    ],
)
def test_models_that_break_the_contract(kind: Any, message: str) -> None:
    torch.manual_seed(0)
    lm = kind(transformers.LlamaConfig(**COMMON))
    for weight in lm.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    refused(lm, rf"^lm: expected .*{message}")


def test_rows_that_mix() -> None:
    """A convolution over tokens shows only when rows are cut otherwise."""

    class Takes(Mixing):
        def forward(self, input_ids, position_ids=None, **others):
            return super().forward(input_ids, position_ids=position_ids, **others)

    refused(Takes(transformers.LlamaConfig(**COMMON)), r"got a change of \d+\.\d% when Takes reads them in another company")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1}, r"no dropout in eval mode, got 0\.1 in LlamaAttention"),
        ({"scaling": torch.ones(())}, r"a number as the attention's scaling, got Tensor"),
        ({"sliding_window": 7}, r"one sliding window, got 7 in the attention and None in the mask of LlamaAttention"),
        ({"attention_mask": None}, r"the masks of transformers\.masking_utils, got no mask in LlamaAttention"),
        ({"s_aux": torch.zeros(3)}, r"4 attention sinks, one a head, got \(3,\)"),
        ({"head_mask": torch.ones(4)}, r"attention that is known here, got 'head_mask' from LlamaAttention"),
        ({"indices": torch.ones(4)}, r"attention that is known here, got 'indices' from LlamaAttention"),
        ({"value": torch.zeros(1, 2, 5, 8)}, r"queries, keys and values of two tokens"),
    ],
)
def test_what_a_layer_may_ask_of_the_attention(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    """A layer that calls the attention function with something else than a Llama's."""
    original = LlamaAttention.forward

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **others):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

        if not self.config._attn_implementation.startswith("funcspec"):
            return original(self, hidden_states, position_embeddings, attention_mask, past_key_values, **others)
        query, key, value = (torch.zeros(1, heads, 2, 8) for heads in (4, 2, 2))
        given = {"query": query, "key": key, "value": value, "attention_mask": attention_mask, **others} | changes
        mixed, _ = FUNCTIONS[self.config._attn_implementation](self, **given)
        return self.o_proj(mixed.flatten(2)), None

    lm = make("llama")
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    refused(lm, rf"^lm: expected {message}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    make("llama").save_pretrained(path)
    words = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{number}": number for number in range(1, VOCAB)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(path)
    return path


def test_a_model_directory(saved: Path, tmp_path: Path) -> None:
    model, tokenizer = load(saved)
    assert tokenizer("w5 w9 w2")["input_ids"] == [5, 9, 2] and model.dtype == torch.float32
    cache = Cache(model, 1, 4)
    _, logits, _ = model.forward(cache.kv, cache.batch([(0, [5, 9, 2])]))
    torch.testing.assert_close(logits, plain(make("llama"), [5, 9, 2]), atol=1e-5, rtol=0)
    assert load(str(saved), dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    make("gpt2").save_pretrained(tmp_path)
    alone, nothing = load(tmp_path)
    assert nothing is None and alone.vocab_fingerprint is None


def test_a_draft_of_another_vocabulary_is_refused(saved: Path) -> None:
    model, tokenizer = load(saved)
    twin, _ = load(saved)
    assert model.vocab_fingerprint is not None and model.vocab_fingerprint == twin.vocab_fingerprint
    fs.init(config(), model, fs.drafters.standalone(twin))
    with pytest.raises(ModelError, match="vocabulary fingerprint"):
        fs.init(config(), model, fs.drafters.standalone(replace(twin, vocab_fingerprint="another")))
    assert tokenizer.add_tokens(["<call>"]) == 1  # tokens of a chat layout do not make another vocabulary
    from funcspec.models.huggingface import _fingerprint

    assert _fingerprint(tokenizer) == model.vocab_fingerprint


def test_directories_that_cannot_be_loaded(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(ModelError, match=r"^path_or_name: expected a causal language model, got "):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"^path_or_name: expected a causal language model, got "):
        load("no-such-owner/no-such-model")
    path = Path(shutil.copytree(saved, tmp_path / "copy"))
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"all weights of LlamaForCausalLM, got 1 missing: \['model\.norm\.weight'\]"):
        load(path)
    shape = json.loads((saved / "config.json").read_text())
    (path / "code.py").write_text("raise SystemExit('remote code ran')\n")
    foreign = {"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (path / "config.json").write_text(json.dumps(shape | foreign))
    with pytest.raises(ModelError, match=r"^path_or_name: expected a causal language model, got ValueError: .* contains custom code"):
        load(path)


def test_a_tokenizer_that_cannot_be_loaded(saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "copy"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"^path_or_name: expected a tokenizer that transformers can load"):
        load(path)
