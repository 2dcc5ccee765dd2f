"""funcspec against transformers on a CPU, in one process and with the same weights in fp32.

    python -m benchmarks.cpu_peers [--only C1 C3] [--repeats 3] [--threads 2]

C1  plain decoding, greedy
C2  speculation with the draft that ships with the package, greedy: assisted generation
C3  prompt lookup on prompts whose answers copy from them, greedy
C4  speculation at temperature 1: rule `ratio` against assisted generation that samples
C5  four prompts together; assisted generation takes one at a time
C8  rounds without models: both loops over stubs

Ways to decode take turns prompt by prompt; whole calls are timed, from prompt to tokens. A ratio is tokens a second over tokens a
second within a turn; the median of a prompt's turns counts, and the geometric mean over prompts. Needs transformers 5.24 or later and
the target's weights: `funcspec.models.smollm2.INSTALL`.
"""

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

import funcspec as fs
from benchmarks.__main__ import machine
from benchmarks.contest import CLOCKS, Aim, Case, Contest, Entrant, Sample, hold
from benchmarks.decoding import Settings
from benchmarks.peers import Generator, generate_together, hugging_face_model
from benchmarks.prompts import prompt_tokens
from benchmarks.round_overhead import Stub, measure
from funcspec.drafters.base import Drafter
from funcspec.jobs import Job, run_job
from funcspec.metrics import statistics as round_statistics
from funcspec.models import smollm2
from funcspec.models.base import Model
from funcspec.models.llama import Llama

LOOKUP_DRAFTS = 10  # what transformers' own documentation of prompt lookup uses
STUB_TOKENS = 400
HOST_GOAL_US = 300
# Tasks that the small target answers by copying. It does not copy code when asked to: it explains it.
COPY = (
    """Repeat this text word for word:

The committee met on the third of March to discuss the repair of the old stone bridge. The engineer said that the eastern pillar had \
sunk by two inches, and that the eastern pillar had to be replaced before the winter.""",
    """Repeat this text word for word:

Wash the rice until the water runs clear. Put the rice and two cups of water into a pot. Bring the water to the boil, cover the pot, \
and let the rice cook for fifteen minutes. Let the rice stand for ten minutes before you serve it.""",
    """Correct the spelling of this text and change nothing else:

The libary is open evry day from nine in the morning until six in the evening. Books may be borrowed for three weeks. Please return \
your books to the desk near the entrance, and keep your libary card with you.""",
    """Summarise this text in two sentences, and quote from it as much as you can:

The river rose quickly after three days of rain. Many families left their homes near the river and moved to the school on the hill. \
The mayor said that the families could stay in the school until the river had gone back to its bed.""",
    """Repeat this list word for word:

- Monday: clean the kitchen and the hall
- Tuesday: clean the kitchen and the bathroom
- Wednesday: water the plants in the hall
- Thursday: clean the kitchen and the windows
- Friday: water the plants in the bathroom""",
    """Rewrite this Python class so that the name Stack becomes Pile, and change nothing else:

class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
""",
)


@dataclass(frozen=True)
class Models:
    """The pair, in our classes and in the peer's."""

    target: Llama
    drafter: fs.drafters.Standalone
    peer: transformers.LlamaForCausalLM
    assistant: transformers.LlamaForCausalLM


def make_models(target: Llama, drafter: fs.drafters.Standalone) -> Models:
    """Copy both models into the peer's classes; the draft keeps its reduced vocabulary there."""
    assert isinstance(drafter.model, Llama)
    return Models(target, drafter, hugging_face_model(target), hugging_face_model(drafter.model, reduced=True))


def own(
    name: str,
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    drafts: int = 0,
    rule: fs.rules.Rule = fs.rules.greedy,
    temperature: float = 0.0,
) -> Entrant:
    """`funcspec.generate`, with rows for the prompts of a case."""

    def run(case: Case, repeat: int) -> Sample:
        seeds = [repeat + 1000 * row for row in range(len(case))]
        found = run_job(Job(target, drafter, list(case), seeds, temperature, settings.max_tokens, settings.stop_ids, rule, drafts))
        counts = round_statistics(found.emissions, drafts)
        return Sample(found.outputs, counts.rounds, counts.emitted)

    return Entrant(f"funcspec {name}", run)


def one_by_one(name: str, generator: Generator) -> Entrant:
    """transformers, one prompt of a case after the other."""

    def run(case: Case, repeat: int) -> Sample:
        torch.manual_seed(repeat)
        found = [generator.decode(prompt) for prompt in case]
        tokens = [decoded.tokens for decoded in found]
        return Sample(tokens, sum(decoded.rounds for decoded in found), sum(decoded.counted for decoded in found))

    return Entrant(f"transformers {name}", run)


def padded(name: str, settings: Settings, model: transformers.LlamaForCausalLM) -> Entrant:
    """transformers, the prompts of a case as one batch."""

    def run(case: Case, repeat: int) -> Sample:
        tokens = generate_together(settings, model, list(case))
        passes = sum(map(len, tokens)) - len(tokens)
        return Sample(tokens, passes, passes)

    return Entrant(f"transformers {name}", run)


def plain(models: Models, settings: Settings, cases: Sequence[Case]) -> Contest:
    """C1."""
    entrants = (
        own("plain", settings, models.target, None),
        one_by_one("plain", Generator(settings, models.peer)),
        one_by_one("plain, static cache", Generator(settings, models.peer, static=True)),
    )
    aims = [Aim("funcspec plain", entrant.name, 1.25) for entrant in entrants[1:]]
    return Contest("C1: plain decoding, greedy", entrants, cases, aims)


def assisted(models: Models, settings: Settings, cases: Sequence[Case], drafts: int) -> Contest:
    """C2, with the draft that ships with the package."""
    ours = own(f"K={drafts}", settings, models.target, models.drafter, drafts)
    entrants = (
        ours,
        own("plain", settings, models.target, None),
        one_by_one("plain", Generator(settings, models.peer)),
        one_by_one(f"assisted, K={drafts}", Generator(settings, models.peer, models.assistant, drafts)),
        one_by_one("assisted, its defaults", Generator(settings, models.peer, models.assistant)),
    )
    leasts = (1.0, None, 1.3, 1.3)
    aims = [Aim(ours.name, entrant.name, least) for entrant, least in zip(entrants[1:], leasts, strict=True)]
    return Contest("C2: speculation with the two-layer draft, greedy", entrants, cases, aims)


def lookup(models: Models, settings: Settings, cases: Sequence[Case]) -> Contest:
    """C3. Each side matches as it does by default: three tokens at most here, two there."""
    ours = own(f"lookup, K={LOOKUP_DRAFTS}", settings, models.target, fs.drafters.ngram(), LOOKUP_DRAFTS)
    entrants = (
        ours,
        one_by_one("plain", Generator(settings, models.peer)),
        one_by_one(f"lookup, K={LOOKUP_DRAFTS}", Generator(settings, models.peer, lookup=LOOKUP_DRAFTS)),
    )
    aims = (Aim(ours.name, entrants[1].name, 1.5), Aim(ours.name, entrants[2].name, 1.3))
    return Contest("C3: prompt lookup where answers copy, greedy", entrants, cases, aims)


def sampled(models: Models, settings: Settings, cases: Sequence[Case], drafts: int) -> Contest:
    """C4. Nothing ends an output early, so that all are of one length."""
    settings = replace(settings, stop_ids=())
    ours = own(f"ratio, K={drafts}", settings, models.target, models.drafter, drafts, fs.rules.ratio, 1.0)
    entrants = (
        ours,
        one_by_one("sampled, plain", Generator(settings, models.peer, sampled=True)),
        one_by_one(f"sampled, assisted, K={drafts}", Generator(settings, models.peer, models.assistant, drafts, sampled=True)),
        one_by_one("sampled, assisted, its defaults", Generator(settings, models.peer, models.assistant, sampled=True)),
    )
    aims = [Aim(ours.name, entrant.name, least) for entrant, least in zip(entrants[1:], (None, 1.3, 1.3), strict=True)]
    return Contest("C4: sampling at temperature 1", entrants, cases, aims, exact=False)


def together(models: Models, settings: Settings, cases: Sequence[Case], drafts: int) -> Contest:
    """C5: all prompts are one case."""
    case = [prompt for each in cases for prompt in each]
    ours = own(f"together, K={drafts}", settings, models.target, models.drafter, drafts)
    entrants = (
        ours,
        own("together, plain", settings, models.target, None),
        one_by_one("plain, one by one", Generator(settings, models.peer)),
        one_by_one(f"assisted, K={drafts}, one by one", Generator(settings, models.peer, models.assistant, drafts)),
        padded("plain, one batch", settings, models.peer),
    )
    aims = [Aim(ours.name, entrant.name, least) for entrant, least in zip(entrants[1:], (None, 2.0, 2.0, None), strict=True)]
    return Contest(f"C5: {len(case)} prompts, greedy", entrants, [case], aims)


class PeerStub(transformers.PreTrainedModel, transformers.GenerationMixin):
    """`round_overhead.Stub` in the peer's classes. Its cache of one layer holds one number a token, as its loop reads lengths there."""

    config_class = transformers.LlamaConfig

    def __init__(self) -> None:
        super().__init__(transformers.LlamaConfig(vocab_size=Stub.vocab_size, num_hidden_layers=1, bos_token_id=None, eos_token_id=None))
        self.place = torch.nn.Parameter(torch.zeros(1), requires_grad=False)  # says where the model is
        self._logits, self._keys = torch.zeros(1, 64, Stub.vocab_size), torch.zeros(1, 1, 64, 1)

    def forward(
        self, input_ids: torch.Tensor, cache: transformers.Cache, logits_to_keep: int = 0, **others: object
    ) -> CausalLMOutputWithPast:
        """Note that the tokens were read, and look the logits up."""
        count = input_ids.shape[1]
        cache.update(self._keys[:, :, :count], self._keys[:, :, :count], 0)
        return CausalLMOutputWithPast(logits=self._logits[:, : logits_to_keep or count], cache=cache)


def overhead(drafts: int, tokens: int = STUB_TOKENS) -> Contest:
    """C8: every draft is right on both sides, so both run the same number of rounds."""
    settings = Settings("cpu", max_tokens=tokens)
    target, drafter, peer, assistant = Stub(), fs.drafters.standalone(Stub()), PeerStub(), PeerStub()
    entrants = (
        own(f"standalone, K={drafts}", settings, target, drafter, drafts),
        one_by_one(f"assisted, K={drafts}", Generator(settings, peer, assistant, drafts)),
        own(f"lookup, K={drafts}", settings, target, fs.drafters.ngram(), drafts),
        one_by_one(f"lookup, K={drafts}", Generator(settings, peer, lookup=drafts)),
        own("plain", settings, target, None),
        one_by_one("plain", Generator(settings, peer)),
    )
    pairs = zip(entrants[::2], entrants[1::2], (5.0, None, None), strict=True)
    return Contest("C8: loops over stubs", entrants, [[[1, 2, 3]]], [Aim(ours.name, other.name, least) for ours, other, least in pairs])


def round_alone(drafts: int, rounds: int) -> dict[str, float]:
    """Print the time of a donated round over stubs, with nothing read from it; return microseconds."""
    times = measure(1, drafts, rounds, donate=True)
    median = statistics.median(times)
    verdict = "met" if median <= HOST_GOAL_US else "missed"
    print(f"a donated round alone, K={drafts}: median {median:.0f} us, least {min(times):.0f}; aim {HOST_GOAL_US}: {verdict}")
    return {"median_us": median, "least_us": min(times)}


CONTESTS = ("C1", "C2", "C3", "C4", "C5", "C8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.cpu_peers", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--only", nargs="+", choices=CONTESTS, default=list(CONTESTS), help="contests to hold")
    options.add_argument("--repeats", type=int, default=3, help="turns of each prompt")
    options.add_argument("--prompts", type=int, choices=range(1, 6), default=2, help="prompts of each kind")
    options.add_argument("--max-tokens", type=int, default=48, help="new tokens for each prompt")
    options.add_argument("--drafts", type=int, default=3, help="drafts a round of the draft model")
    options.add_argument("--threads", type=int, default=2, help="torch's threads, for both sides")
    options.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="process: processor time, for one thread on a machine that is busy with other work"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    found = options.parse_args(arguments)
    if min(found.repeats, found.max_tokens, found.drafts, found.threads) < 1:
        options.error("numbers start at 1")
    return found


def contests(options: argparse.Namespace) -> dict[str, Callable[[], Contest]]:
    """What there is over the default pair, made when it is its turn."""
    tokenizer, target = smollm2.load_tokenizer(), smollm2.load_target()
    models = make_models(target, fs.drafters.standalone(*smollm2.load_draft(target)))
    cases = [[prompt] for of_kind in prompt_tokens(tokenizer, options.prompts).values() for prompt in of_kind]
    copies = [[tokenizer.encode(smollm2.chat_prompt(text)).ids] for text in COPY[: 2 * options.prompts]]
    longest = max(len(prompt) for case in (*cases, *copies) for prompt in case)
    settings = Settings("cpu", max_tokens=options.max_tokens, max_model_len=longest + options.max_tokens, stop_ids=smollm2.END_TOKENS)
    return {
        "C1": lambda: plain(models, settings, cases),
        "C2": lambda: assisted(models, settings, cases, options.drafts),
        "C3": lambda: lookup(models, settings, copies),
        "C4": lambda: sampled(models, settings, cases, options.drafts),
        "C5": lambda: together(models, settings, cases[:: max(1, len(cases) // 4)][:4], options.drafts),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the machine, then each contest."""
    options = parse(arguments)
    if "cache" not in inspect.signature(transformers.LlamaForCausalLM.forward).parameters:
        raise SystemExit(f"transformers 5.24 or later is needed, this is {transformers.__version__}")
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {"machine": machine("cpu"), "options": {name: value for name, value in vars(options).items() if name != "json"}}
    print(
        ", ".join(f"{name} {version}" for name, version in found["machine"].items()),
        f"{options.threads} threads, {options.clock} clock",
        sep=", ",
    )
    known = contests(options) if set(options.only) - {"C8"} else {}
    known["C8"] = lambda: overhead(options.drafts)
    for name in options.only:
        print()
        started = time.perf_counter()
        held = hold(known[name](), options.repeats, CLOCKS[options.clock])
        found[name] = {key: [asdict(each) for each in value] if isinstance(value, list) else value for key, value in held.items()}
        if name == "C8":
            found[name]["round"] = round_alone(options.drafts, 100 * options.repeats)
        print(f"({time.perf_counter() - started:.0f} s)", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
