"""Targets of the distillation example: a tiny random Llama that transformers saved, read and distilled through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import COMMON, transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import funcspec as fs
from examples.distil.__main__ import main, parser, sources, students
from examples.distil.drafts import load, save, student_of
from examples.distil.targets import Target, load_target, read_llama
from funcspec.errors import FuncspecError, ModelError
from funcspec.metrics import statistics
from funcspec.models import ForwardBatch
from funcspec.models.llama import Llama

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)
START, END = "<s>", "</s>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """One token a byte, and two that begin and end texts."""
    inner = Tokenizer(models.BPE({token: number for number, token in enumerate([START, END, "<mask>", *BYTES])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=START, eos_token=END)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def save_model(folder: Path, **settings: Any) -> Any:
    """A tiny random Llama with weights large enough for attention to matter."""
    torch.manual_seed(0)
    shape = COMMON | {"vocab_size": 259, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1} | settings
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, attn_implementation="eager")).eval()
    for weight in lm.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=weight.shape[-1] ** -0.5)
    lm.save_pretrained(folder)
    return lm


def logits_of(model: Llama, tokens: list[int]) -> torch.Tensor:
    count = len(tokens)
    kv = {entry.name: torch.zeros((model.num_layers, 2, 16, *entry.shape)) for entry in model.kv_spec.entries}
    places = torch.arange(count, dtype=torch.int32)
    starts = torch.tensor([0, count], dtype=torch.int32)
    table = torch.arange(2, dtype=torch.int32)[None]
    batch = ForwardBatch(torch.tensor(tokens, dtype=torch.int32), places, starts, starts[1:], places, table, None, count)
    return model.forward(kv, batch)[1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
)
def test_a_llama_of_transformers_is_read_as_it_is(tmp_path: Path, settings: dict[str, Any]) -> None:
    lm, tokens = save_model(tmp_path, **settings), [*range(3, 30)]
    with torch.no_grad():
        expected = lm(torch.tensor([tokens]), use_cache=False).logits[0]
    found = logits_of(read_llama(tmp_path, torch.float32, "cpu"), tokens)
    assert torch.allclose(found, expected, atol=1e-4)
    assert expected.std() > 0.5


def test_weights_in_several_files_are_put_together(tmp_path: Path) -> None:
    lm = save_model(tmp_path / "one")
    lm.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (read_llama(tmp_path / name, torch.float32, "cpu").weights for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_what_belongs_to_a_target_comes_from_its_directory(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    target = load_target(tmp_path, torch.float32, "cpu")
    assert target.opening == (0,)
    assert target.end_tokens == (1,)
    assert target.chat_prompt is not None
    assert target.chat_prompt("Hi") == "<s>[user] Hi</s>[answer]"
    encoded = target.encode(target.chat_prompt("Hi"))
    assert [encoded[0], encoded.index(1)] == [0, len("<s>[user] Hi") - 2]
    opened, plain, asked = sources(target)
    assert bytes_of(opened.prompts(1, 0)) == "[user] "
    assert plain.prompts(2, 0)[:, 0].tolist() == [0, 0]
    turn = bytes_of(asked.prompts(1, 5))
    assert turn.startswith("[user] ") and turn.endswith("[answer]") and len(turn) == len("[user] [answer]") + 48
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert load_target(tmp_path, torch.float32, "cpu").end_tokens == (1, 2)


def bytes_of(prompts: torch.Tensor) -> str:
    return "".join(BYTES[token - 3] for token in prompts[0].tolist() if token > 2).replace("Ġ", " ")


def test_a_model_that_does_not_chat_only_continues(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path, template=None)
    target = load_target(tmp_path, torch.float32, "cpu")
    assert target.chat_prompt is None
    assert [source.name for source in sources(target)] == ["text"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "expected LlamaForCausalLM, got ['Qwen2ForCausalLM']"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}}, "scaled or partial rotary embeddings"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "scaled or partial rotary embeddings"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"num_hidden_layers": 3}, "missing or odd names ['model.layers.2."),
        ({"num_hidden_layers": 1}, "missing or odd names ['model.layers.1."),
        ({"tie_word_embeddings": False, "intermediate_size": 60}, "expected (120, 32) for '0.gate_up'"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    save_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError) as caught:
        read_llama(tmp_path, torch.float32, "cpu")
    assert says in str(caught.value)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"target: expected a directory with a config.json"):
        load_target(tmp_path, torch.float32, "cpu")
    save_model(tmp_path)
    with pytest.raises(ModelError, match=r"target: expected a directory with a tokenizer"):
        load_target(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "mask_id: expected a token for the masks of 'parallel'"),
        (["--mask-id", "2", "--layers", "0"], "--layers: expected one --kind"),
        (["--mask-id", "2", "--depth", "0"], "depth: expected at least 1"),
        (["--mask-id", "2", "--cuts", "0"], "cuts: expected at least 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    save_model(tmp_path)
    model = read_llama(tmp_path, torch.float32, "cpu")
    options = parser().parse_args(["--kind", "medusa", "--kind", "parallel", "--out", "nowhere", *arguments])
    with pytest.raises(FuncspecError) as caught:
        students(Target(model, lambda text: [], (), None, ()), options)
    assert str(caught.value).startswith(says)


def test_one_draft_of_a_kind_is_trained(tmp_path: Path) -> None:
    """Alone, a saved draft is trained and no other; beside it another of its kind would have the same folder."""
    save_model(tmp_path)
    model = read_llama(tmp_path, torch.float32, "cpu")
    target = Target(model, lambda text: [], (), None, ())
    path = save(tmp_path, student_of(model, "medusa", depth=2), torch.arange(20, dtype=torch.int32))
    start = ["--out", "nowhere", "--start", str(path)]
    ((student, ids),) = students(target, parser().parse_args(start))
    assert student.kind == "medusa" and len(student.parameters["blocks"]) == 2 and ids is not None
    pairs = students(target, parser().parse_args([*start, "--kind", "mtp", "--layers", str(model.num_layers)]))
    assert [(student.kind, ids is None) for student, ids in pairs] == [("medusa", False), ("mtp", True)]
    for more in (["--kind", "medusa"], ["--start", str(path)]):
        with pytest.raises(FuncspecError, match=r"^--start: expected one draft of a kind"):
            students(target, parser().parse_args([*start, *more]))


def test_several_kinds_are_trained_on_the_same_texts(tmp_path: Path) -> None:
    """Each for about the same time, each in its folder, with a report; and each drafts for its target."""
    folder, out = tmp_path / "model", tmp_path / "drafts"
    save_model(folder)
    save_tokenizer(folder)
    kinds = ("medusa", "mtp", "parallel", "dflash")
    arguments = [argument for kind in (*kinds, "mtp") for argument in ("--kind", kind)]
    for name, value in {
        "target": folder, "out": out, "minutes": 0.24, "passages": 3, "rows": 8, "new": 20, "batch": 4, "cuts": 4, "output-rows": 100,
        "mask-id": 2, "evaluate-tokens": 4,
    }.items():  # fmt: skip
        arguments += [f"--{name}", str(value)]
    main(arguments)
    assert sorted(path.name for path in out.iterdir()) == sorted(kinds)
    model, times = read_llama(folder, torch.float32, "cpu"), []
    for kind in kinds:
        report = json.loads((out / kind / "report.json").read_text())
        assert report["kind"] == kind
        assert report["training"]["steps"] > 5
        assert len(report["training"]["loss_by_draft"]) == 3
        assert [len(report["evaluation"][part]) for part in ("text", "chat")] == [(5 if kind == "mtp" else 3) + 1] * 2
        times.append(report["training"]["seconds"])
        drafter = load(out / kind, model)
        config = fs.SpecConfig(max_num_reqs=1, max_model_len=64, num_speculative_tokens=3, rule=fs.rules.greedy)
        assert sum(statistics(fs.generate(config, model, drafter, [[5, 6, 7]], max_tokens=12), 3).drafted) > 5
    assert max(times) < 2 * min(times)
