"""Output buffers that show what a launch wrote: poisoned inside, with a band of poison on either side."""

from collections.abc import Sequence

import torch

POISON = -777
BAND = 7


class Buffers:
    """Makes buffers between guard bands and checks the bands afterwards."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.bands: list[torch.Tensor] = []

    def poisoned(self, length: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A buffer full of poison."""
        whole = torch.full((length + 2 * BAND,), POISON, dtype=dtype, device=self.device)
        self.bands += [whole[:BAND], whole[length + BAND :]]
        return whole[BAND : length + BAND]

    def holding(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A buffer with these values."""
        buffer = self.poisoned(len(values), dtype)
        buffer.copy_(torch.tensor(values, dtype=dtype))
        return buffer

    def table(self, rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.int32, extra_columns: int = 2) -> torch.Tensor:
        """A matrix whose rows lie further apart than they are wide; what lies between is an id that must not be used."""
        width = len(rows[0]) if rows else 0
        whole = torch.full((len(rows), width + extra_columns), 999_983, dtype=dtype, device=self.device)
        whole[:, :width] = torch.tensor(rows, dtype=dtype).reshape(len(rows), width)
        return whole[:, :width]

    def check(self) -> None:
        """Fail if a band was written."""
        for band in self.bands:
            assert (band == POISON).all(), "a guard band was written"
