"""Set up before anything imports triton: interpret kernels where there is no GPU, and use one CPU thread."""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
torch.set_num_threads(1)

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("funcspec", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("few", deadline=None, derandomize=True, max_examples=3)  # for runs under a sanitizer
settings.load_profile("funcspec")


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both implementations of a kernel; "triton" is the interpreter without a GPU and compiled code with one."""
    return request.param


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what needs JAX on the CPU, beside tensors there, where JAX works on a GPU."""
    if item.get_closest_marker("jax_on_cpu") and jax.default_backend() != "cpu":
        pytest.skip("JAX works on another device than this test's tensors")


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where kernel tests put their tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `tests/test_golden.py` run over other archives and on one backend."""
    group = parser.getgroup("golden vectors")
    group.addoption("--golden-dir", help="directory of .npz archives (default: tests/golden)")
    group.addoption("--backend", choices=("reference", "interpret", "cuda", "lift"), help="run the golden vectors on this backend only")
