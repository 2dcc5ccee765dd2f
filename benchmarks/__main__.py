"""The benchmark. `python -m benchmarks [calibration] [smollm2]`; --help lists the options."""

import argparse
import json
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import calibration, smollm2
from benchmarks.decoding import Settings
from benchmarks.timing import on_gpu
from funcspec.errors import ModelError
from funcspec.models.smollm2 import END_TOKENS

SECTIONS = ("calibration", "smollm2")


def machine(device: str) -> dict[str, str]:
    """What ran: processor, versions."""
    found = {"device": torch.cuda.get_device_name() if on_gpu(device) else platform.processor() or platform.machine()}
    found["python"] = platform.python_version()
    for package in ("torch", "triton", "jax", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    options.add_argument("sections", nargs="*", metavar="section", help=f"any of {', '.join(SECTIONS)}; all unless named")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the models (default: bfloat16 on a GPU, else float32)")
    options.add_argument("--rounds", type=int, default=100, help="rounds timed alone in each way")
    options.add_argument("--repeats", type=int, default=3, help="how often each prompt is decoded in the quick ways; slow ones do it once")
    options.add_argument("--prompts", type=int, choices=range(1, 6), default=3, help="prompts of each kind")
    options.add_argument("--max-tokens", type=int, default=128, help="new tokens for each prompt")
    options.add_argument("--max-model-len", type=int, default=512, help="capacity of a row")
    options.add_argument("--drafts", type=int, nargs="+", default=[1, 3, 7], help="numbers of drafts a round")
    options.add_argument("--peers", nargs="*", choices=smollm2.PEERS, default=list(smollm2.PEERS), help="transformers generation to run")
    options.add_argument("--peer-drafts", type=int, nargs="+", default=[3], help="numbers of drafts for its assisted generation")
    options.add_argument("--threads", type=int, help="torch's threads on the CPU (default: torch's choice)")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    settings = options.parse_args(arguments)
    if unknown := sorted(set(settings.sections) - set(SECTIONS)):
        options.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        options.error("--device cuda: torch finds no GPU")
    if min(settings.rounds, settings.repeats, settings.max_tokens, *settings.drafts, *settings.peer_drafts) < 1:
        options.error("numbers start at 1")
    settings.sections = settings.sections or list(SECTIONS)
    settings.dtype = settings.dtype or ("bfloat16" if settings.device == "cuda" else "float32")
    return settings


def run_section(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one section; returns its numbers."""
    if name == "calibration":
        found = calibration.calibrate(options.device)
        calibration.print_calibration(found)
        return found
    settings = Settings(
        options.device,
        tuple(sorted(set(options.drafts))),
        options.max_tokens,
        options.max_model_len,
        END_TOKENS,
        options.rounds,
        options.repeats,
    )
    try:
        return smollm2.run(settings, getattr(torch, options.dtype), options.prompts, tuple(options.peer_drafts), tuple(options.peers))
    except ModelError as error:  # the weights are not installed
        print(f"left out: {error}")
        return {"left_out": str(error)}


def main(arguments: list[str] | None = None) -> None:
    """Print the machine, then each section."""
    options = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"machine": machine(options.device), "options": {}}
    results["options"] = {name: value for name, value in vars(options).items() if name != "json"}
    print(", ".join(f"{name} {version}" for name, version in results["machine"].items()))
    for name in options.sections:
        print(f"\n== {name} ==", flush=True)
        started = time.perf_counter()
        results[name] = run_section(name, options)
        results[name]["seconds"] = time.perf_counter() - started
        print(f"({results[name]['seconds']:.0f} s)", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
