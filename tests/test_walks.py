"""Random walks over the public functions: requests come, fork, rest, move, shrink and go, and no token and no block goes astray.

Every round is compared with its written definition: drafts, accepted drafts, tokens. Every state that is still held must keep its
value, whatever is done to others, donated or not. Every block has exactly the holders it counts.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expected_rounds import DRAFTERS, LENGTH, TARGET, VOCAB, Row, first_drafts, judged, more_drafts
from hypothesis import given, note
from hypothesis import strategies as st
from oracle import config

import funcspec as fs
from funcspec.drafters import Drafter
from funcspec.errors import DonatedStateError, PoolExhaustedError
from funcspec.pool import Pool
from funcspec.state import ARRAY_FIELDS

ROUND_START, DRAFTING, SCORED = "round start", "drafting", "scored"
ROWS, MOST_STATES, MOST_PAUSED, MOST_DRAFT_STEPS = 3, 6, 4, 6
STEPS = 50
JUNK = 10**6  # no token, so that reading it changes every answer


# ---------------------------------------------------------------- states, and what is known of them


def worth(state: fs.SpecState) -> Any:
    """All that counts in a state."""
    if state.lease.phase != SCORED:
        return fs.snapshot(state)
    return [getattr(state, name).tolist() for name in ARRAY_FIELDS]


@dataclass(eq=False)
class Node:
    """A state that is held, the requests in its rows, and what it was worth when it was new."""

    state: fs.SpecState
    rows: dict[int, Row]
    scores: fs.Scores | None = None
    value: Any = field(init=False)

    def __post_init__(self) -> None:
        self.value = worth(self.state)
        check_rows(self.state, self.rows)

    @property
    def phase(self) -> str:
        return self.state.lease.phase

    @property
    def count(self) -> int:
        return self.state.config.max_num_reqs

    @property
    def idle(self) -> list[int]:
        return [row for row in range(self.count) if row not in self.rows]


def check_rows(state: fs.SpecState, rows: Mapping[int, Row]) -> None:
    """Every field is what the definition says."""
    fields = {name: getattr(state, name).tolist() for name in ARRAY_FIELDS}
    for index in range(state.config.max_num_reqs):
        row = rows.get(index)
        if row is None:
            assert not any(fields[name][index] for name in ("num_tokens", "is_live", "num_draft", "num_drafted", "bad_row"))
            assert set(fields["tokens"][index]) == {-1}
            continue
        written = [*row.tokens, *row.drafts]
        expected = {
            "tokens": written + [-1] * (LENGTH - len(written)),
            "num_tokens": len(row.tokens),
            "prompt_len": row.prompt_len,
            "row_limit": row.limit,
            "min_len": min(row.min_len, LENGTH),
            "num_draft": row.planned,
            "num_drafted": len(row.drafts),
            "is_live": int(not row.finish_reason),
            "finish_reason": row.finish_reason,
            "bad_row": 0,
        }
        assert {name: fields[name][index] for name in expected} == expected


def branches(state: fs.SpecState) -> Iterator[tuple[str, Any]]:
    """What a state holds of its pools, by role."""
    yield "target", state.lease.target
    if state.lease.draft is not None:
        yield "draft", state.lease.draft


def check_blocks(nodes: list[Node], pools: list[Pool]) -> None:
    """Each block counts the rows that hold it, no more and no less; the others are free; rows of one state share none."""
    holders: dict[int, dict[int, Any]] = {id(pool): {} for pool in pools}
    for node in nodes:
        for role, branch in branches(node.state):
            table = node.state.block_tables if role == "target" else node.state.draft_block_tables
            owned = [() if row is None else row.ids for row in branch.rows]
            assert [tuple(block for block in ids if block >= 0) for ids in table.tolist()] == owned
            assert len({block for ids in owned for block in ids}) == sum(map(len, owned))
            assert {index for index, ids in enumerate(owned) if ids} == set(node.rows)
            holders[id(branch.pool)] |= {id(row): row for row in branch.rows if row is not None}
    for pool in pools:
        counts = Counter(block for row in holders[id(pool)].values() for block in row.ids)
        assert [counts[block] for block in range(pool.num_blocks)] == pool._references
        assert sorted(pool._free) == [block for block in range(pool.num_blocks) if not counts[block]]


def spoil(nodes: list[Node], pools: list[Pool]) -> None:
    """Write junk to every place of the KV that no held state relies on."""
    needed = {id(pool): np.zeros((pool.num_blocks, pool.block_size), bool) for pool in pools}
    for node in nodes:
        for role, branch in branches(node.state):
            for index, row in node.rows.items():
                drafts, size = len(row.drafts), branch.pool.block_size
                length = len(row.tokens) + (drafts if node.phase == SCORED else -1)
                if role == "draft":  # drafts that were fed count for rows that draft on
                    length = int(node.state.draft_len[index]) + (max(drafts - 1, 0) if drafts < row.planned else 0)
                for block, start in zip(branch.rows[index].ids, range(0, length, size), strict=False):
                    needed[id(branch.pool)][block, : length - start] = True
    for pool in pools:
        for cache in pool.kv.values():
            cache[:, ~needed[id(pool)]] = JUNK


def restored(state: fs.SpecState, drafter: Drafter | None, kv: bool) -> fs.SpecState:
    return fs.restore(fs.snapshot(state, kv=kv), TARGET, drafter)


def loaded(state: fs.SpecState, drafter: Drafter | None, kv: bool) -> fs.SpecState:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        fs.save(state, path, kv=kv)
        return fs.load(path, TARGET, drafter, config=state.config)


# ---------------------------------------------------------------- the walk


class Walk:
    """Holds a handful of states and does to them anything that a user may do."""

    def __init__(self, acceptance: fs.rules.Rule, source: random.Random) -> None:
        self.acceptance, self.source = acceptance, source
        self.nodes: list[Node] = []
        self.paused: list[tuple[fs.Snapshot, list[Row]]] = []
        self.pools: list[Pool] = []
        self.drafting = source.choice(DRAFTERS)
        self.drafter = self.drafting.drafter
        self.config = config(
            rows=ROWS,
            length=LENGTH,
            drafts=source.choice([0, 1, 3, 3, 4]),
            rule=acceptance,
            block_size=(size := source.choice([2, 4, 16])),
            num_blocks=source.choice([None, 500, ROWS * LENGTH // size + 6]),
            max_num_stop_ids=2,
            allows_min_tokens=source.random() < 0.5,
        )
        note(f"{self.drafter}, {self.config}")
        self.keep(Node(fs.init(self.config, TARGET, self.drafter), {}))
        self.admit(self.nodes[0], False)

    def keep(self, node: Node) -> None:
        self.nodes.append(node)
        self.pools += [branch.pool for _, branch in branches(node.state) if branch.pool not in self.pools]

    def go(self) -> None:
        """Do one thing to one of the states, mostly to the newest."""
        node = self.nodes[-1] if self.source.random() < 0.6 else self.source.choice(self.nodes)
        choices = self.choices(node)
        name = self.source.choices(list(choices), list(choices.values()))[0]
        donate = self.source.random() < 0.4
        note(f"{name} of {self.nodes.index(node)} of {len(self.nodes)}{', donated' * donate}")
        getattr(self, name)(node, donate)
        del node, self.nodes[:-MOST_STATES]  # what is forgotten must give its blocks back
        assert [worth(node.state) == node.value for node in self.nodes] == [True] * len(self.nodes)
        check_blocks(self.nodes, self.pools)

    def choices(self, node: Node) -> dict[str, int]:
        """What may be done to a state, and how often it is."""
        live = any(not row.finish_reason for row in node.rows.values())
        found = {"fork": 2, "spoil": 2, "forget": 1, "release": 1 if live else 3 * bool(node.rows)}
        if node.phase == SCORED:
            return found | {"accept": 8}
        found["copy"] = 1
        if node.phase == DRAFTING or self.drafting.limit is None:
            found |= {"verify": 4 if live else 1, "score": 2}
        if node.phase == DRAFTING:
            return found | {"decode": 6 * (node.state.lease.draft_steps < MOST_DRAFT_STEPS)}
        if self.drafter is not None:
            found["prefill"] = 6 if live else 1
        if node.rows:
            found |= {"step_round": 6 if live else 1, "preempt": 2, "truncate": 3}
        if node.idle:
            found["admit"] = 3 if live else 9
        if self.paused:
            found |= {"resume": 3 * any(len(requests) <= len(node.idle) for _, requests in self.paused), "restore_paused_rows": 1}
        return found

    def advance(self, node: Node, donate: bool, step: Callable[[fs.SpecState], Any]) -> Any:
        """Take a step, or find that a small pool has too few blocks for it; a donated state is dead afterwards, else it is as before."""
        try:
            result = step(node.state)
        except PoolExhaustedError:
            if worth(node.state) != node.value:
                # A donated round gives up its drafts, and feeds the draft model the newest token again.
                assert donate and node.phase == ROUND_START
                node.__post_init__()
            return None
        if donate:
            self.nodes.remove(node)
            with pytest.raises(DonatedStateError):
                _ = node.state.tokens
        return result

    def request(self) -> dict[str, Any]:
        """A prompt and its settings."""
        source, most = self.source, self.source.choice([None, None, 30, 12, 5, 1])
        least = source.choice([0, 3, 8]) if self.config.allows_min_tokens else 0
        return {
            "prompt": source.choices(range(source.choice([2, VOCAB, VOCAB])), k=source.choice([1, 2, 5, 9, 20])),
            "seeds": source.randrange(-(2**63), 2**64),
            "temperature": source.choice([0.0, 0.7, 1.6]) if self.acceptance.samples else 0.0,
            "max_tokens": most,
            "min_tokens": least if most is None else min(least, most),
            "stop_ids": source.sample(range(VOCAB), source.choice([0, 0, 0, 1, 2])),
        }

    def admit(self, node: Node, donate: bool) -> None:
        rows = self.source.sample(node.idle, self.source.randint(1, min(2, len(node.idle))))
        given = [self.request() for _ in rows]
        prompts, options = [one["prompt"] for one in given], {"rows": rows, "chunk": self.source.choice([None, 1, 3]), "donate": donate}
        options |= {name: [one[name] for one in given] for name in given[0] if name != "prompt"}
        result = self.advance(node, donate, lambda state: fs.admit(state, TARGET, self.drafter, prompts, **options))
        if result is None:
            return
        new = dict(node.rows)
        for place, (row, one) in enumerate(zip(rows, given, strict=True)):
            prompt, most = tuple(one["prompt"]), one["max_tokens"]
            limit = LENGTH if most is None else min(LENGTH, len(prompt) + most)
            least = len(prompt) + one["min_tokens"] if one["min_tokens"] else 0
            request = Row(prompt, len(prompt), limit, one["seeds"], one["temperature"], tuple(one["stop_ids"]), least)
            new[row], (token,), _ = judged(request, self.acceptance)
            assert (result[1].rows[place], result[1].tokens[place]) == (row, token)
        self.keep(Node(result[0], new))

    def first(self, node: Node) -> tuple[Any, dict[int, Row]]:
        """`num_draft` for a round, and its rows after draft step 0."""
        most = self.config.num_speculative_tokens
        given = self.source.choice([None, self.source.randint(0, most), [self.source.randint(0, most) for _ in range(node.count)]])
        wanted = given if isinstance(given, list) else [most if given is None else given] * node.count
        return given, {index: first_drafts(row, wanted[index], self.drafting, self.acceptance) for index, row in node.rows.items()}

    def prefill(self, node: Node, donate: bool) -> None:
        given, rows = self.first(node)
        self.drafted(self.advance(node, donate, lambda state: fs.prefill(state, self.drafter, num_draft=given, donate=donate)), rows)

    def decode(self, node: Node, donate: bool) -> None:
        rows = {index: more_drafts(row, self.acceptance) for index, row in node.rows.items()}
        self.drafted(self.advance(node, donate, lambda state: fs.decode(state, self.drafter, donate=donate)), rows)

    def drafted(self, result: tuple[fs.SpecState, fs.Draft] | None, rows: dict[int, Row]) -> None:
        """Compare a draft with the definition, and keep its state."""
        if result is None:
            return
        state, draft = result
        for index, row in rows.items():
            assert draft.tokens[index].tolist() == [*row.drafts, *[-1] * (self.config.num_speculative_tokens - len(row.drafts))]
        self.keep(Node(state, rows))

    def verify(self, node: Node, donate: bool) -> None:
        self.accepted(self.advance(node, donate, lambda state: fs.verify(state, TARGET, donate=donate)), node.rows)

    def score(self, node: Node, donate: bool) -> None:
        result = self.advance(node, donate, lambda state: fs.score(state, TARGET, donate=donate))
        if result is not None:
            self.keep(Node(result[0], node.rows, result[1]))

    def accept(self, node: Node, donate: bool) -> None:
        self.accepted(self.advance(node, donate, lambda state: fs.accept(state, node.scores, donate=donate)), node.rows)

    def step_round(self, node: Node, donate: bool) -> None:
        given, rows = self.first(node) if self.drafter is not None else (None, node.rows)
        for _ in range(self.config.num_speculative_tokens - 1):
            rows = {index: more_drafts(row, self.acceptance) for index, row in rows.items()}
        self.accepted(
            self.advance(node, donate, lambda state: fs.step_round(state, TARGET, self.drafter, num_draft=given, donate=donate)), rows
        )

    def accepted(self, result: tuple[fs.SpecState, fs.Verdict] | None, rows: Mapping[int, Row]) -> None:
        """Compare a verdict with the definition, and keep its state."""
        if result is None:
            return
        state, verdict = result
        after: dict[int, Row] = {}
        for index in range(state.config.max_num_reqs):
            tokens, accepted, drafted = [], 0, 0
            if index in rows:
                after[index], tokens, accepted = judged(rows[index], self.acceptance)
                drafted = len(rows[index].drafts)
            assert verdict.tokens[index].tolist() == tokens + [-1] * (self.config.num_speculative_tokens + 1 - len(tokens))
            counts = int(verdict.num_emitted[index]), int(verdict.num_accepted[index]), int(verdict.num_drafted[index])
            assert counts == (len(tokens), accepted, drafted)
        self.keep(Node(state, after))

    def fork(self, node: Node, donate: bool) -> None:
        # The definition of the ratio rule draws and judges with one seed, so under it no seed is changed in mid-round.
        reseeds = donate and (node.phase == ROUND_START or self.acceptance is not fs.rules.ratio)
        seeds = [self.source.randrange(-(2**63), 2**64) for _ in range(node.count)] if reseeds else None
        rows = {index: row if seeds is None else replace(row, seed=seeds[index]) for index, row in node.rows.items()}
        self.keep(Node(fs.fork(node.state, seeds=seeds), rows, node.scores))

    def release(self, node: Node, donate: bool) -> None:
        gone = self.source.sample(range(node.count), self.source.randint(1, min(2, node.count)))
        self.let_go(node, donate, gone)

    def let_go(self, node: Node, donate: bool, rows: list[int]) -> None:
        state = self.advance(node, donate, lambda state: fs.release(state, rows, donate=donate))
        self.keep(Node(state, {index: row for index, row in node.rows.items() if index not in rows}, node.scores))

    def preempt(self, node: Node, donate: bool) -> None:
        rows = self.some_rows(node)
        taken = fs.snapshot(node.state, rows=rows, kv=self.source.random() < 0.5)
        self.paused = [*self.paused, (taken, [node.rows[row] for row in rows])][-MOST_PAUSED:]
        self.let_go(node, donate, rows)

    def some_rows(self, node: Node) -> list[int]:
        return self.source.sample(sorted(node.rows), self.source.randint(1, len(node.rows)))

    def resume(self, node: Node, donate: bool) -> None:
        taken, requests = self.source.choice([paused for paused in self.paused if len(paused[1]) <= len(node.idle)])
        bare = any(cache.rows is None for cache in taken.caches.values())
        models = (TARGET, self.drafter) if bare or self.source.random() < 0.5 else ()
        rows = self.source.sample(node.idle, len(requests))
        state = self.advance(node, donate, lambda state: fs.resume(state, taken, *models, rows=rows, donate=donate))
        if state is not None:
            self.keep(Node(state, node.rows | dict(zip(rows, requests, strict=True))))
            again = fs.snapshot(state, rows=rows, kv=not bare)
            assert replace(again, config=taken.config) == taken

    def truncate(self, node: Node, donate: bool) -> None:
        rows, finish = dict(node.rows), self.source.random() < 0.2
        lengths = {row: self.source.randint(rows[row].prompt_len + 1, len(rows[row].tokens)) for row in self.some_rows(node)}
        state = self.advance(node, donate, lambda state: fs.truncate(state, lengths, finish=finish, donate=donate))
        for row, length in lengths.items():
            reason = 1 if finish else 2 * (length >= rows[row].limit)
            rows[row] = replace(rows[row], tokens=rows[row].tokens[:length], finish_reason=reason)
        self.keep(Node(state, rows))

    def copy(self, node: Node, donate: bool) -> None:
        """The same state in pools of its own."""
        way = self.source.choice([restored, loaded])
        self.keep(Node(way(node.state, self.drafter, self.source.random() < 0.5), node.rows, node.scores))
        assert self.nodes[-1].value == node.value

    def restore_paused_rows(self, node: Node, donate: bool) -> None:
        """A state with these rows only."""
        taken, requests = self.source.choice(self.paused)
        self.keep(Node(fs.restore(taken, TARGET, self.drafter), dict(enumerate(requests))))

    def spoil(self, node: Node, donate: bool) -> None:
        spoil(self.nodes, self.pools)

    def forget(self, node: Node, donate: bool) -> None:
        if len(self.nodes) > 1:
            self.nodes.remove(node)


@pytest.mark.parametrize("acceptance", [fs.rules.greedy, fs.rules.coupled, fs.rules.ratio], ids=repr)
@given(source=st.randoms(use_true_random=True))
def test_walks(acceptance: fs.rules.Rule, source: random.Random) -> None:
    walk = Walk(acceptance, source)
    for _ in range(STEPS):
        walk.go()
    walk.nodes.clear()
    assert all(pool.num_free_blocks == pool.num_blocks for pool in walk.pools)
