"""A launch of `window_inputs_` with poisoned, guarded outputs, and the answer of an independent oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcspec.kernels.op import Backend
from funcspec.kernels.window_inputs import DRAFTED, FEED, window_inputs_

from .guarded import POISON, Buffers

BY_PLACE = ("input_ids", "positions", "slot_mapping", "token_rows")
BY_ROW = ("seq_lens", "last_token_indices")
BEYOND = 2  # places that every output has beyond those the launch may write

Output = dict[str, list[int]]


@dataclass(frozen=True)
class Row:
    """One row of a batch; `drafts` lie behind the committed tokens, whether they count or not."""

    committed: Sequence[int] = ()
    drafts: Sequence[int] = ()
    fed: int = 0
    num_draft: int = 0
    num_drafted: int | None = None
    live: bool = True
    blocks: Sequence[int] = field(default=(0,))

    @property
    def made(self) -> int:
        return len(self.drafts) if self.num_drafted is None else self.num_drafted


def row_at(length: int, **changes: Any) -> Row:
    """A row with `length` committed tokens, all different."""
    return Row(committed=range(100, 100 + length), **changes)


class Launch:
    """One batch and its buffers."""

    def __init__(
        self,
        device: str,
        kind: int,
        rows: list[Row],
        width: int,
        *,
        limit: int = 64,
        block_size: int = 4,
        length: int = 64,
        columns: int | None = None,
        dtype: torch.dtype = torch.int32,
        **guess: int,
    ) -> None:
        self.buffers = Buffers(device)
        self.guess = {"shift": 0, "num_masks": 0, "mask_id": 0, "num_choices": 1, "choice_offset": 0, "query_only": False} | guess
        self.rows = rows
        self.columns = max([len(row.blocks) for row in rows] + [1]) if columns is None else columns
        sequences = [[*row.committed, *row.drafts] for row in rows]

        def array(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.inputs: dict[str, Any] = {
            "kind": kind,
            "tokens": self.buffers.table([(tokens + [-1] * length)[:length] for tokens in sequences], dtype, 3),
            "num_tokens": array([len(row.committed) for row in rows]),
            "fed_len": array([row.fed for row in rows]),
            "num_draft": array([row.num_draft for row in rows]),
            "num_drafted": array([row.made for row in rows]),
            "is_live": array([int(row.live) for row in rows]),
            "block_tables": self.buffers.table([([*row.blocks] + [-1] * self.columns)[: self.columns] for row in rows], dtype),
            "block_size": block_size,
            "width": width,
            "limit": limit,
            **guess,
        }
        self.counts = dict.fromkeys(BY_PLACE, len(rows) * width) | dict.fromkeys(BY_ROW, len(rows))
        self.counts["last_token_indices"] *= self.guess["num_choices"]
        self.outputs = {f"out_{name}": self.buffers.poisoned(max(count, 0) + BEYOND) for name, count in self.counts.items()}

    def run(self, backend: Backend) -> Output:
        before = {name: value.clone() for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        window_inputs_(**self.inputs, **self.outputs, backend=backend)
        self.buffers.check()
        for name, value in before.items():
            assert torch.equal(self.inputs[name], value), f"{name} was written"
        out = {name: self.outputs[f"out_{name}"].tolist() for name in BY_PLACE + BY_ROW}
        for name in out:
            assert set(out[name][self.counts[name] :]) <= {POISON}, f"{name} was written beyond the batch"
            del out[name][self.counts[name] :]
        return out

    def expected(self) -> Output:
        """The contract, a place at a time."""
        kind, width, size = self.inputs["kind"], self.inputs["width"], self.inputs["block_size"]
        shift, num_masks = self.guess["shift"], self.guess["num_masks"]
        first_choice, num_choices = self.guess["choice_offset"], self.guess["num_choices"]
        out: Output = {name: [] for name in BY_PLACE + BY_ROW}
        for number, row in enumerate(self.rows):
            n, sequence, only = len(row.committed), [*row.committed, *row.drafts], self.guess["query_only"]
            ahead = shift + (row.made if kind == DRAFTED and only else 0)  # of a position is the token that is fed there
            if kind == FEED:
                wanted = range(row.fed, n - shift)
            elif kind == DRAFTED:
                wanted = range(n + row.made - 1 - ahead, n + row.made - ahead if row.made < row.num_draft else 0)
            else:
                wanted = range(n - 1, n + min(row.num_draft, row.made))
            window: list[tuple[int, int]] = []
            for position in wanted[: width - num_masks] if row.live else ():
                if not 0 <= position < self.inputs["limit"] or sequence[position + ahead] < 0:
                    break
                window.append((position, sequence[position + ahead]))
            last = max(len(window) - 1, 0)
            for _ in range(num_masks if window else 0):
                if window[-1][0] + 1 < self.inputs["limit"]:
                    window.append((window[-1][0] + 1, self.guess["mask_id"]))
            for position, token in window:
                column = position // size
                block = row.blocks[column] if column < min(len(row.blocks), self.columns) else -1
                slot = block * size + position % size
                out["input_ids"].append(token)
                out["positions"].append(position)
                out["slot_mapping"].append(slot if block >= 0 and not only else -1)
                out["token_rows"].append(number)
            empty = width - len(window)
            for name, neutral in zip(BY_PLACE, (0, 0, -1, -1), strict=True):
                out[name] += [neutral] * empty
            out["seq_lens"].append(window[-1][0] + 1 if window else 0)
            out["last_token_indices"] += [number * width + last + first_choice + choice for choice in range(num_choices)]
        return out


def run(backend: Backend, device: str, kind: int, rows: list[Row], width: int, **changes: Any) -> Output:
    """Run a batch, compare it with the oracle, and return it."""
    launch = Launch(device, kind, rows, width, **changes)
    out = launch.run(backend)
    assert out == launch.expected()
    return out
