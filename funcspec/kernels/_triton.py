"""Triton where it is installed; otherwise stand-ins that let kernel files be imported and their references be used."""

import os
import threading
from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton import jit

    HAS_TRITON = True
except ImportError:  # no wheel for this platform
    triton: Any = None
    tl: Any = SimpleNamespace(constexpr=object)
    HAS_TRITON = False

    def jit(fn: Any) -> Any:
        """Leave the kernel as a plain function that nothing calls."""
        return fn


# Triton reads the variable when it is first imported; later changes do nothing.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

# The interpreter keeps its program ids in globals: two threads at once give wrong results.
INTERPRETER_LOCK = threading.RLock()

__all__ = ["HAS_TRITON", "INTERPRETED", "INTERPRETER_LOCK", "jit", "tl", "triton"]
