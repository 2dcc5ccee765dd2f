"""Drafters: the protocol, and one file for each kind."""

from funcspec.drafters.base import Drafter
from funcspec.drafters.fallback import Fallback, fallback
from funcspec.drafters.ngram import Ngram, ngram
from funcspec.drafters.proposals import Proposer, place_proposals
from funcspec.drafters.standalone import Standalone, standalone

__all__ = ["Drafter", "Fallback", "Ngram", "Proposer", "Standalone", "fallback", "ngram", "place_proposals", "standalone"]
