"""Drafters: the protocol, and one file for each kind."""

from funcspec.drafters.base import Drafter
from funcspec.drafters.eagle import Eagle, eagle
from funcspec.drafters.fallback import Fallback, fallback
from funcspec.drafters.ngram import Ngram, ngram
from funcspec.drafters.proposals import Proposer, place_proposals
from funcspec.drafters.standalone import Standalone, standalone

__all__ = [
    "Drafter",
    "Eagle",
    "Fallback",
    "Ngram",
    "Proposer",
    "Standalone",
    "eagle",
    "fallback",
    "ngram",
    "place_proposals",
    "standalone",
]
