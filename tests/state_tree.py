"""A random tree of states: forks, old states that are stepped again, donated steps, rows cut back and released."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, precondition, rule
from oracle import checksum_greedy, config, output

import funcspec as fs
from funcspec.errors import DonatedStateError

MOST = 30
"""Most tokens of a row."""


@dataclass(eq=False)
class Node:
    """A state, how it came about, and what it was worth when it was new."""

    state: fs.SpecState
    history: tuple[tuple, ...]
    value: fs.Snapshot


class StateTree(RuleBasedStateMachine):
    """Walks a tree; every old state must keep its value and its future, and every branch equal a fresh run.

    Subclasses name the pair, whose target is the checksum model, and prompts.
    """

    nodes = Bundle("nodes")
    target: ClassVar[Any]
    drafter: ClassVar[Any]
    prompts: ClassVar[Any]

    def same(self, value: fs.Snapshot, other: fs.Snapshot) -> None:
        """Compare two values."""
        assert value == other

    def check(self, state: fs.SpecState) -> None:
        """Look at a new state."""

    @initialize(target=nodes, block_size=st.sampled_from([2, 4, 16]), data=st.data())
    def begin(self, block_size: int, data: st.DataObject) -> Node:
        self.config = config(rows=2, length=40, drafts=3, block_size=block_size, num_blocks=2000)
        self.kept: list[Node] = []
        first = ("admit", data.draw(st.integers(0, len(self.prompts) - 1)), MOST)
        return self._keep(self._apply(fs.init(self.config, self.target, self.drafter), first), (first,))

    def _keep(self, state: fs.SpecState, history: tuple[tuple, ...]) -> Node:
        self.check(state)
        self.kept.append(Node(state, history, fs.snapshot(state)))
        return self.kept[-1]

    def _apply(self, state: fs.SpecState, action: tuple, donate: bool = False) -> fs.SpecState:
        """One step, by name."""
        name, *arguments = action
        if name == "admit":
            prompt, most = arguments
            return fs.admit(state, self.target, self.drafter, [self.prompts[prompt]], seeds=[3], max_tokens=most, donate=donate)[0]
        if name == "release":
            return fs.release(state, [arguments[0]], donate=donate)
        if name == "truncate":
            return fs.truncate(state, {arguments[0]: arguments[1]}, donate=donate)
        if name == "prefill":
            return fs.prefill(state, self.drafter, num_draft=list(arguments[0]), donate=donate)[0]
        if name == "decode":
            return fs.decode(state, self.drafter, donate=donate)[0]
        return fs.verify(state, self.target, donate=donate)[0]

    def _action(self, node: Node, data: st.DataObject) -> tuple:
        if node.state.lease.phase != "round start":
            return (data.draw(st.sampled_from(["decode", "decode", "verify", "verify"])),)
        counts, prompts = node.state.num_tokens.tolist(), node.state.prompt_len.tolist()
        held = [row for row in range(2) if counts[row]]
        choices = ["prefill"] * 4 + ["release"] + ["truncate"] * bool(held) + ["admit"] * (len(held) < 2)
        name = data.draw(st.sampled_from(choices))
        if name == "admit":
            return (name, data.draw(st.integers(0, len(self.prompts) - 1)), data.draw(st.integers(1, MOST)))
        if name == "release":
            return (name, data.draw(st.integers(0, 1)))
        if name == "truncate":
            row = data.draw(st.sampled_from(held))
            return (name, row, data.draw(st.integers(prompts[row] + 1, counts[row])))
        return (name, tuple(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2))))

    @rule(target=nodes, node=nodes, data=st.data())
    def step(self, node: Node, data: st.DataObject) -> Node:
        action = self._action(node, data)
        return self._keep(self._apply(node.state, action), (*node.history, action))

    @rule(target=nodes, node=nodes, data=st.data())
    def step_twice(self, node: Node, data: st.DataObject) -> Node:
        action = self._action(node, data)
        again = self._keep(self._apply(node.state, action), (*node.history, action))
        self.same(again.value, fs.snapshot(self._apply(node.state, action)))
        return again

    @rule(target=nodes, node=nodes)
    def fork(self, node: Node) -> Node:
        return self._keep(fs.fork(node.state), node.history)

    @rule(target=nodes, node=consumes(nodes), data=st.data())
    def donated_step(self, node: Node, data: st.DataObject) -> Node:
        action = self._action(node, data)
        new = self._keep(self._apply(node.state, action, donate=True), (*node.history, action))
        self.kept.remove(node)
        with pytest.raises(DonatedStateError):
            _ = node.state.tokens
        return new

    @precondition(lambda self: len(self.kept) > 1)
    @rule(node=consumes(nodes))
    def forget(self, node: Node) -> None:
        self.kept.remove(node)

    @rule(target=nodes, node=nodes)
    def restore(self, node: Node) -> Node:
        return self._keep(fs.restore(node.value), node.history)

    def teardown(self) -> None:
        for node in getattr(self, "kept", []):
            self.same(fs.snapshot(node.state), node.value)  # an old state keeps its value
            # A fresh run donates all the way, so that no copy-on-write takes part.
            fresh = fs.init(self.config, self.target, self.drafter)
            for action in node.history:
                fresh = self._apply(fresh, action, donate=True)
            self.check(fresh)
            self.same(fs.snapshot(fresh), node.value)
            for row in range(2):
                prompt = node.state.tokens[row, : int(node.state.prompt_len[row])].tolist()
                assert not prompt or output(node.state, row) == checksum_greedy(prompt, len(output(node.state, row)))
