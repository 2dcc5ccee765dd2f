"""Whole jobs: prompts decoded to their end, timed, and compared with plain decoding of the same target."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from funcspec import rules
from funcspec.checks import Comparison, check_comparable, first_difference, preference_margin
from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, check_bool, check_int, refuse, type_name
from funcspec.generation import Emission, generate
from funcspec.models.base import KV, Array, ForwardBatch, KVSpec, Model
from funcspec.partners import check_drafter, check_model
from funcspec.requests import prompt_lists


@dataclass(frozen=True)
class Job:
    """One decoding job: what runs and how.

    Attributes:
        target, drafter: the models; a drafter of None decodes plainly.
        prompts, seeds, temperature, max_tokens, stop_ids: as for `generate`.
        rule: the acceptance rule.
        num_speculative_tokens: drafts a round.
        max_num_reqs: rows, so most prompts at a time; None is one for each prompt.
        tokenizer, stop_strings, min_tokens: as for `generate`.
        device: where the models are.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError: a field cannot be run; what `generate` looks at is refused by `run_job`.
    """

    target: Model
    drafter: Drafter | None
    prompts: list[list[int]]
    seeds: list[int]
    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    rule: rules.Rule
    num_speculative_tokens: int
    max_num_reqs: int | None = None
    tokenizer: Any = None
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_model("target", self.target)
        if self.drafter is not None:
            check_drafter(self.drafter)
        prompt_lists(self.prompts)
        if not isinstance(self.temperature, int | float) or isinstance(self.temperature, bool):
            refuse("temperature", "a number", repr(self.temperature)[:60], "use 0 for greedy", ArgumentTypeError)
        if not isinstance(self.rule, rules.Rule):
            refuse("rule", "an acceptance rule", type_name(self.rule), "pass one of funcspec.rules", ArgumentTypeError)
        check_int("max_tokens", self.max_tokens, 1)
        check_int("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.max_num_reqs is not None:
            check_int("max_num_reqs", self.max_num_reqs, 1)


@dataclass
class Run:
    """What a job gave.

    Attributes:
        outputs: tokens by prompt.
        texts: text by prompt, if the job has a tokenizer.
        emissions: what came in which round.
        seconds: the whole time.
        draft_seconds, target_seconds: time in passes of the two models, prompts included.
    """

    outputs: list[list[int]]
    texts: list[str]
    emissions: list[Emission] = field(default_factory=list)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0


class TimedModel:
    """A model that counts the seconds of its passes. On a GPU they are those of launching."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.seconds = 0.0
        self.vocab_size: int = model.vocab_size
        self.max_len: int = model.max_len
        self.kv_spec: KVSpec = model.kv_spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, Array, tuple[Array, ...]]:
        """Run the model and note how long it took."""
        started = time.perf_counter()
        result = self.model.forward(kv, batch)
        self.seconds += time.perf_counter() - started
        return result


def timed_drafter(drafter: Drafter | None) -> tuple[Drafter | None, TimedModel | None]:
    """The drafter with its model timed, where it has one as its field `model` or `heads`, or its `second` drafter has."""
    held = vars(drafter) if is_dataclass(drafter) else {}
    if isinstance(held.get("second"), Drafter):
        second, timed = timed_drafter(held["second"])
        return replace(drafter, second=second), timed  # type: ignore[type-var]
    name = next((name for name in ("model", "heads") if name in held), None)
    if name is None:
        return drafter, None
    timed = TimedModel(held[name])
    return replace(drafter, **{name: timed}), timed  # type: ignore[type-var]


def run_job(job: Job, on_emission: Callable[[Emission], None] | None = None, *, padded: bool = False) -> Run:
    """Decode all prompts.

    Args:
        job: what to decode.
        on_emission: called with what each round emitted.
        padded: without a drafter, decode in the shape of speculative passes.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError: as for `generate`, before anything is decoded.
    """
    _check_job(job)
    if on_emission is not None and not callable(on_emission):
        refuse("on_emission", "a function of an Emission, or None", type(on_emission).__name__, "leave it out", ArgumentTypeError)
    check_bool("padded", padded)
    width = job.num_speculative_tokens if job.drafter is not None or padded else 0
    longest = max(map(len, job.prompts)) + job.max_tokens
    config = SpecConfig(
        max_num_reqs=min(job.max_num_reqs or len(job.prompts), len(job.prompts)),
        max_model_len=max(longest, width + 1),
        num_speculative_tokens=width,
        rule=job.rule,
        device=job.device,
    )
    target = TimedModel(job.target)
    drafter, draft = timed_drafter(job.drafter)
    run = Run([[] for _ in job.prompts], [""] * len(job.prompts))
    options: dict[str, Any] = {name: getattr(job, name) for name in ("max_tokens", "min_tokens", "stop_ids", "tokenizer", "stop_strings")}
    started = time.perf_counter()
    for emission in generate(config, target, drafter, job.prompts, seeds=job.seeds, temperature=job.temperature, **options):
        run.emissions.append(emission)
        run.outputs[emission.prompt_index] += emission.tokens
        run.texts[emission.prompt_index] += emission.text
        if on_emission is not None:
            on_emission(emission)
    run.seconds = time.perf_counter() - started
    run.target_seconds, run.draft_seconds = target.seconds, 0.0 if draft is None else draft.seconds
    return run


def _check_job(job: object) -> None:
    if not isinstance(job, Job):
        refuse("job", "a Job", type(job).__name__, "make one with Job(...)", ArgumentTypeError)


@dataclass(frozen=True)
class TimedComparison(Comparison):
    """A run against plain decoding of the same target, and the seconds of the fastest plain decoding."""

    plain_seconds: float


def compare(job: Job, run: Run) -> TimedComparison:
    """Decode plainly, one token a pass and in the shape of speculative passes, and compare tokens and time.

    Raises:
        ArgumentError: the rule draws another sample than plain decoding, the job has no seeds, or the run is of other prompts.
        ArgumentTypeError: no job, or no run.
    """
    _check_job(job)
    if not isinstance(run, Run):
        refuse("run", "a Run", type_name(run), "pass what run_job(job) returned", ArgumentTypeError)
    if len(run.outputs) != len(job.prompts):
        expected = f"the run of this job, with an output for each of {len(job.prompts)} prompts"
        refuse("run", expected, f"one of {len(run.outputs)}", "pass what run_job(job) returned")
    if job.seeds is None:
        refuse("job.seeds", "a seed for each prompt, as the runs are to draw the same", "None", "give every prompt a seed")
    check_comparable(job.rule, [job.temperature])
    plain_job = replace(job, drafter=None)
    padded, single = run_job(plain_job, padded=True), run_job(plain_job)
    difference = first_difference(run.outputs, single.outputs)
    margin = None
    if difference is not None:
        prompt, place = difference
        tokens = job.prompts[prompt] + single.outputs[prompt][:place]
        forbidden = job.stop_ids if place < job.min_tokens else ()
        seed = job.seeds[prompt]
        margin = preference_margin(job.target, tokens, seed, job.temperature, forbidden=forbidden, device=job.device)
    return TimedComparison(run.outputs == padded.outputs, difference, margin, min(padded.seconds, single.seconds))


__all__ = ["Job", "Run", "TimedComparison", "compare", "run_job"]
