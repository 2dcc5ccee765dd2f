"""Rounds inside JAX programs: a scan over rounds of the same weights, which XLA records as command buffers on a GPU."""

import statistics
import time
from functools import partial

import jax
import torch

import funcspec as fs
from benchmarks.decoding import Decoded, RoundTimes, Settings, Way
from benchmarks.timing import on_gpu
from funcspec.interop import jax_model
from funcspec.models.base import Model
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.llama import Llama

ROUNDS_A_PROGRAM = 16


def of_jax(model: Model) -> Model:
    """A Llama as a model of JAX, sharing its weights where JAX can; any other model lifted."""
    return JaxLlama.from_torch(model) if isinstance(model, Llama) else jax_model(model)


class JaxRounds:
    """Rounds at batch 1 as `lax.scan` in one donated program.

    Args:
        settings: what to decode.
        target, drafter: the models, of torch.
        drafts: K; 0 is plain decoding.
    """

    def __init__(self, settings: Settings, target: Model, drafter: fs.drafters.Standalone, drafts: int) -> None:
        self.config = fs.SpecConfig(1, settings.max_model_len, drafts, fs.rules.greedy, device=settings.device)
        self._settings = settings
        self._target = of_jax(target)
        self._drafter = None
        if drafts:
            ids = drafter.token_ids
            self._drafter = fs.drafters.standalone(of_jax(drafter.model), None if ids is None else jax.dlpack.from_dlpack(ids.clone()))
        self.state = fs.init(self.config, self._target, self._drafter)

        @partial(jax.jit, donate_argnums=0)
        def program(state: fs.SpecState, target: Model, drafter: fs.drafters.Standalone | None) -> tuple[fs.SpecState, fs.Verdict]:
            return jax.lax.scan(lambda state, _: fs.step_round(state, target, drafter), state, length=ROUNDS_A_PROGRAM)

        self._program = program

    def admit(self, prompt: list[int], max_tokens: int | None = None, stop_ids: tuple[int, ...] = ()) -> int:
        """Put a prompt in place of the one before; return its first token."""
        self.state, first = fs.admit(
            fs.release(self.state, [0]), self._target, self._drafter, [prompt], seeds=[0], max_tokens=max_tokens, stop_ids=stop_ids
        )
        jax.block_until_ready(self.state)
        return first.tokens[0]

    def run(self) -> fs.Verdict:
        """Give the next rounds to the device."""
        self.state, verdicts = self._program(self.state, self._target, self._drafter)
        return verdicts

    def decode(self, prompt: list[int]) -> Decoded:
        """Decode a prompt, reading what each program emitted before the next one.

        Results that are still held when a program runs change its addresses, and XLA would record it anew.
        """
        first = self.admit(prompt, self._settings.max_tokens, self._settings.stop_ids)
        emitted, rounds, goes_on = [], 0, True
        started = time.perf_counter()
        while goes_on:
            verdicts = jax.device_get(self.run())
            counts = verdicts.num_emitted[:, 0].tolist()
            for tokens, count in zip(verdicts.tokens[:, 0].tolist(), counts, strict=True):
                emitted += tokens[:count]
                rounds += count > 0
            goes_on = counts[-1] > 0 and int(verdicts.finish_reason[-1, 0]) == 0
        return Decoded([first, *emitted], len(emitted), rounds, time.perf_counter() - started)

    def time_rounds(self, prompt: list[int]) -> RoundTimes:
        """Time programs that each go on from the prompt, so that the row is live in all of their rounds."""
        device, host = [], []
        for number in range(-(-self._settings.rounds // ROUNDS_A_PROGRAM) + 1):
            self.admit(prompt)
            started = time.perf_counter()
            verdicts = self.run()
            launched = time.perf_counter()
            jax.block_until_ready(verdicts)
            if number:  # the first one compiles
                device.append((time.perf_counter() - started) / ROUNDS_A_PROGRAM)
                host.append((launched - started) / ROUNDS_A_PROGRAM)
        median = statistics.median(device) * 1e3
        return RoundTimes(median, statistics.median(host) * 1e6, min(host) * 1e6) if on_gpu(self.config.device) else RoundTimes(median)


def jax_way(settings: Settings, target: Model, drafter: fs.drafters.Standalone, drafts: int) -> Way:
    """A row of the table. Like a peer it is left out where it cannot run, for example on a GPU that JAX does not see."""
    made: list[JaxRounds] = []

    def rounds() -> JaxRounds:
        if not made:
            if on_gpu(settings.device):
                torch.cuda.empty_cache()  # what torch keeps for itself JAX cannot have
            made.append(JaxRounds(settings, target, drafter, drafts))
        return made[0]

    name = f"funcspec {f'K={drafts}' if drafts else 'plain'}, JAX scan"
    return Way(name, lambda prompt: rounds().decode(prompt), lambda prompt: rounds().time_rounds(prompt))
