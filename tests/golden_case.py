"""One case of a golden archive, how it is run on each backend, and what is compared."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from funcspec.interop import lift
from funcspec.kernels.op import Op

POISON = -777


@dataclass(frozen=True)
class Case:
    """One case of an archive, and where to run it.

    Attributes:
        tags: what the case stresses.
        inputs, outputs, written: the archive's arrays by name.
        backend: "reference", "triton" or "lift".
        device: of the tensors.
    """

    tags: frozenset[str]
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    written: Mapping[str, np.ndarray]
    backend: str = "reference"
    device: str = "cpu"

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], backend: str = "reference", device: str = "cpu") -> "Case":
        """A case of its arrays in an archive."""
        groups = [
            {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
            for kind in ("in/", "out/", "written/")
        ]
        return cls(frozenset(json.loads(str(arrays["meta"]))["tags"]), *groups, backend, device)

    def tensor(self, name: str) -> torch.Tensor:
        """A private copy of an input."""
        return self.place(self.inputs[name])

    def optional(self, name: str) -> torch.Tensor | None:
        """A private copy of an input that the case may lack."""
        return self.tensor(name) if name in self.inputs else None

    def place(self, array: np.ndarray) -> torch.Tensor:
        """A private copy of any array, on the device."""
        return torch.tensor(array, device=self.device)

    def number(self, name: str) -> int:
        """A scalar input."""
        return int(self.inputs[name])

    def poisoned(self, name: str) -> torch.Tensor:
        """A buffer like the output, full of poison."""
        array = self.outputs[name]
        return self.place(np.full_like(array, False if array.dtype == bool else POISON))

    def table(self) -> torch.Tensor:
        """The block table: the leading columns of a wider buffer."""
        return self.tensor("block_table")[:, : self.number("block_table_num_cols")]

    def run(self, op: Op, **arguments: Any) -> None:
        """Run an operation on the case's backend, in the buffers it is given."""
        if self.backend != "lift":
            op(**arguments, backend=self.backend)  # type: ignore[arg-type]
            return
        with jax.enable_x64(True):
            arrays = {name: jnp.array(value.numpy()) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
            static = {name: value for name, value in arguments.items() if name not in arrays}
            static |= {name: None for name in op.writes if name not in arguments}
            new = lift(op)(**arrays, **static)
            jax.block_until_ready(new)
        for name, array in arrays.items():  # what was given is as it was
            np.testing.assert_array_equal(np.asarray(array), arguments[name].numpy(), err_msg=name)
        for name, array in new.items():
            arguments[name].copy_(torch.from_numpy(np.array(array)))

    def expect(self, **actual: torch.Tensor) -> None:
        """Compare whole buffers, written or not, with the archive."""
        assert set(actual) == set(self.outputs)
        for name, array in actual.items():
            np.testing.assert_array_equal(array.cpu().numpy(), self.outputs[name], err_msg=name)


@dataclass(frozen=True)
class Adapter:
    """How to run an archive.

    Attributes:
        run: compares one case.
        covers: which cases it can run, from tags and inputs; all of them if None.
        is_host: a plain function, for which backends do not matter.
    """

    run: Callable[[Case], None]
    covers: Callable[[frozenset[str], Callable[[str], np.ndarray]], bool] | None = None
    is_host: bool = False
