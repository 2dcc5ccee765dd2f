"""What features of `FeatureTarget` have to be, from the tokens alone, and pairs of models that notice wrong ones."""

from typing import Any

import numpy as np
from feature_toys import FeatureDraft, FeatureTarget
from oracle import VOCAB

import funcspec as fs
from funcspec.drafters.eagle import Eagle, eagle
from funcspec.leases import host_copy


def feature_pair(layers: tuple[int, ...] = (0, 2), *, spread: bool = False, **settings: Any) -> tuple[FeatureTarget, Eagle, FeatureDraft]:
    """A target, a drafter of a head that reads its hidden states, and the head."""
    head = FeatureDraft(layers=layers, spread=spread, **settings)
    return FeatureTarget(spread=spread), eagle(head), head


def right_features(tokens: list[int], position: int, layers: tuple[int, ...]) -> list[float]:
    """Hidden states of the layers at a position, side by side: the position, its token and the checksum so far, plus the layer."""
    total = 1 + sum((place + 1) * token for place, token in enumerate(tokens[: position + 1]))
    return [float(value + layer) for layer in layers for value in (position, tokens[position], total % VOCAB)]


def check_features(state: fs.SpecState) -> int:
    """At the start of a round every row holds the hidden states of its positions that are still to be fed; returns how many."""
    partner, features = state.lease.models["draft"], host_copy(state.lease.carried()["features"])
    count = 0
    for row, (n, fed) in enumerate(zip(state.num_tokens.tolist(), state.draft_len.tolist(), strict=True)):
        tokens = state.tokens[row, :n].tolist()
        for place, position in enumerate(range(fed, min(n - 1, partner.max_len))):
            assert features[row, place].tolist() == right_features(tokens, position, partner.features.layers), (row, position)
            count += 1
    return count


def same_bits(left: fs.Snapshot, right: fs.Snapshot) -> None:
    """Two snapshots to the bit, with the name of what differs."""
    for part in ("fields", "carried"):
        ours, theirs = getattr(left, part), getattr(right, part)
        assert set(ours) == set(theirs)
        for name, values in ours.items():
            np.testing.assert_array_equal(values, theirs[name], err_msg=name)
    assert left == right
