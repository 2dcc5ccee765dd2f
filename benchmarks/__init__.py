"""Benchmarks. Nothing here is part of the package."""

import os

# Read by JAX when it starts: leave memory to torch, and record loops over kernels as command buffers.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_gpu_enable_command_buffer=+CUSTOM_CALL,+WHILE,+FUSION,+CUBLAS,+CUBLASLT --xla_gpu_graph_min_graph_size=1"
)
