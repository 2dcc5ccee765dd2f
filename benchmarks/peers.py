"""Hugging Face transformers on the same weights: plain and assisted generation. Import it only where transformers is installed."""

import inspect
import time

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.decoding import Decoded, Settings, Way
from benchmarks.timing import synchronise
from funcspec.models.llama import Llama, LlamaConfig

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"transformers 5 or later is needed, this is {transformers.__version__}")
transformers.logging.set_verbosity_error()


def hugging_face_config(config: LlamaConfig, *, tied: bool = True) -> transformers.LlamaConfig:
    """The shape in the peer's words."""
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def hugging_face_weights(model: Llama) -> dict[str, torch.Tensor]:
    """Weights by the peer's names. A head over a reduced vocabulary is left out: the embedding takes its place."""
    config, weights = model.config, model.weights
    attention, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    head = weights["embed"] if model.output_token_ids is not None else weights.get("head", weights["embed"])
    named = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"], "lm_head.weight": head}
    for layer in range(config.num_layers):
        query, key, value = weights[f"{layer}.qkv"].split([attention, kv, kv])
        gate, up = weights[f"{layer}.gate_up"].chunk(2)
        parts = {
            "input_layernorm": weights[f"{layer}.attention_norm"],
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": weights[f"{layer}.attention_output"],
            "post_attention_layernorm": weights[f"{layer}.mlp_norm"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": weights[f"{layer}.down"],
        }
        named |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in parts.items()}
    return named


class ReducedHead(torch.nn.Module):
    """The output matrix of a reduced vocabulary, with logits of -inf for all other tokens: transformers wants vocabularies to be equal."""

    def __init__(self, weight: torch.Tensor, token_ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("weight", weight)
        self.register_buffer("token_ids", token_ids.long())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to [..., vocab_size]."""
        logits = x.new_full((*x.shape[:-1], self.vocab_size), -torch.inf)
        return logits.index_copy_(-1, self.token_ids, torch.nn.functional.linear(x, self.weight))


def hugging_face_model(model: Llama, *, reduced: bool = False) -> transformers.LlamaForCausalLM:
    """The same model, with copies of the weights, in the peer's classes.

    Args:
        model: ours.
        reduced: keep the reduced vocabulary of a model that has one, so that both draw from the same law; see `ReducedHead`.
    """
    weights = hugging_face_weights(model)
    tied = weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    config = hugging_face_config(model.config, tied=tied)
    # The dtype is given here and not by .to(), which would round the rotary frequencies too.
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    built.load_state_dict(weights)
    if reduced and model.output_token_ids is not None:
        built.lm_head = ReducedHead(model.weights["head"].clone(), model.output_token_ids, model.config.vocab_size)
    return built.to(model.device).eval()


class Clock(BaseStreamer):
    """Starts when the first tokens after the prompt are there, and counts what comes after them."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._puts: list[int] = []
        self._started = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then the tokens of each pass."""
        self._puts.append(value.numel())
        if len(self._puts) == 2:
            synchronise(self._device)
            self._started = time.perf_counter()

    def end(self) -> None:
        """Generation is over; nothing to do."""

    def decoded(self, tokens: list[int]) -> Decoded:
        """Stop."""
        synchronise(self._device)
        seconds = time.perf_counter() - self._started
        return Decoded(tokens, sum(self._puts[2:]), len(self._puts[2:]), seconds)


def generation_config(settings: Settings, *, lookup: int = 0, sampled: bool = False) -> transformers.GenerationConfig:
    """What to generate, in the peer's words; the options are those of `Generator`."""
    return transformers.GenerationConfig(
        do_sample=sampled,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}),
        prompt_lookup_num_tokens=lookup or None,
        max_new_tokens=settings.max_tokens,
        eos_token_id=list(settings.stop_ids) or None,
        pad_token_id=0,
        use_cache=True,
    )


def generate_together(settings: Settings, model: transformers.LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """Decode prompts greedily as one batch, padded on the left; return the tokens of each."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=settings.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=settings.device)
    output = model.generate(ids, attention_mask=mask, generation_config=generation_config(settings))[:, width:].tolist()
    ends = [next((place + 1 for place, token in enumerate(row) if token in settings.stop_ids), len(row)) for row in output]
    return [row[:end] for row, end in zip(output, ends, strict=True)]


class Generator:
    """`transformers` generation at batch 1.

    Args:
        settings: what to decode.
        model: the target.
        assistant: a model to draft, or None.
        drafts: drafts of the assistant in each round, always that many; 0 leaves it to transformers' defaults.
        static: use a static cache; on a GPU transformers then compiles the model by itself.
        lookup: drafts of prompt lookup in each round; 0 is none.
        sampled: sample at temperature 1 from the whole vocabulary, by torch's generator; else greedy.
    """

    def __init__(
        self,
        settings: Settings,
        model: transformers.LlamaForCausalLM,
        assistant: transformers.LlamaForCausalLM | None = None,
        drafts: int = 0,
        *,
        static: bool = False,
        lookup: int = 0,
        sampled: bool = False,
    ) -> None:
        self._settings, self._model, self._assistant, self._drafts = settings, model, assistant, drafts
        self._config = generation_config(settings, lookup=lookup, sampled=sampled)
        # One cache for all prompts: a fresh one would be recorded anew.
        self._cache = transformers.StaticCache(config=model.config, max_cache_len=settings.max_model_len) if static else None

    def decode(self, prompt: list[int]) -> Decoded:
        """Decode a prompt; the clock starts when the first pass has given its tokens."""
        ids = torch.tensor([prompt], device=self._settings.device)
        clock = Clock(self._settings.device)
        more: dict[str, object] = {}
        if self._assistant is not None:
            own = self._assistant.generation_config
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = self._drafts or None, "constant"
            own.assistant_confidence_threshold = 0.0 if self._drafts else None  # or it would stop drafting when it is unsure
            more["assistant_model"] = self._assistant
        if self._cache is not None:
            self._cache.reset()
            renamed = "cache" in inspect.signature(self._model.forward).parameters  # since transformers 5.24 or so
            more["cache" if renamed else "past_key_values"] = self._cache
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self._config, streamer=clock, **more)
        return clock.decoded(output[0, len(prompt) :].tolist())


def peer_ways(settings: Settings, target: Llama, draft: Llama, drafts: tuple[int, ...], kinds: tuple[str, ...]) -> list[Way]:
    """Ways of transformers to decode.

    Args:
        settings: what to decode.
        target, draft: our models; a draft with a reduced output gets the whole embedding as its head, as transformers wants
            both vocabularies to be equal.
        drafts: numbers of drafts for assisted generation.
        kinds: any of "plain", "static" and "assisted".
    """
    model = hugging_face_model(target)
    found = []
    if "plain" in kinds:
        found.append(Way("transformers plain", Generator(settings, model).decode, slow=True))
    if "static" in kinds:
        found.append(Way("transformers plain, static cache", Generator(settings, model, static=True).decode, slow=True))
    if "assisted" in kinds:
        assistant = hugging_face_model(draft)
        for count in drafts:
            generator = Generator(settings, model, assistant, count)
            found.append(Way(f"transformers assisted, K={count}", generator.decode, slow=True))
    return found
