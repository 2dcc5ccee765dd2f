"""A scan over rounds as XLA command buffers: Python runs in the first call and never again."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FLAGS = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL,+WHILE,+FUSION --xla_gpu_graph_min_graph_size=1"

PROGRAM = """
import jax, jax.numpy as jnp
import funcspec as fs
from funcspec import interop
from funcspec.models.base import KVSpec

ran = []
called = interop._OpCall.__call__
def counted(self, *arguments):
    ran.append(self.op.name)
    called(self, *arguments)
interop._OpCall.__call__ = counted

class Step:
    '''A model of JAX without a cache: the next token is the newest times `factor` plus one.'''
    framework, vocab_size, max_len, kv_spec = "jax", 97, 4096, KVSpec(0, ())
    def __init__(self, factor):
        self.factor = factor
    def forward(self, kv, batch):
        ids = batch.input_ids if batch.logits_indices is None else batch.input_ids[batch.logits_indices]
        wanted = (ids * self.factor + 1) % 97
        wanted = jnp.where((self.factor == 6) & (wanted % 3 == 0), 5, wanted)
        return kv, jax.nn.one_hot(wanted, 97), ()

target, drafter = Step(5), fs.drafters.standalone(Step(6))
config = fs.SpecConfig(4, 256, 3, fs.rules.coupled, device="cuda")
prompts = [[1], [2, 3], [4], [5, 6, 7]]
state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, prompts, seeds=[1, 2, 3, 4], temperature=[0, 0, 0.2, 0.2])
eager = fs.fork(state)
for _ in range(8):
    eager, _ = fs.step_round(eager, target, drafter)
ran.clear()
run = jax.jit(lambda state: jax.lax.scan(lambda s, _: fs.step_round(s, target, drafter), state, length=8), donate_argnums=0)
counts = []
for number in range(6):
    state, verdicts = run(state)
    jax.block_until_ready(state)
    counts.append(len(ran))
    if number == 0:
        assert fs.snapshot(state) == fs.snapshot(eager)
print("callbacks after each call:", counts)
assert counts[0] > 0 and counts[2:] == [counts[1]] * 4, counts
"""


def test_python_runs_in_the_first_calls_only() -> None:
    environment = os.environ | {"XLA_FLAGS": FLAGS, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
