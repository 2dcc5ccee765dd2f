"""Drafters: the protocol, and one file for each kind."""

from funcspec.drafters.argmax import argmax
from funcspec.drafters.base import Drafter
from funcspec.drafters.best_of import BestOf, best_of
from funcspec.drafters.cascade import Cascade, cascade
from funcspec.drafters.dflash import BlockDrafter, dflash
from funcspec.drafters.eagle import Eagle, eagle
from funcspec.drafters.early_exit import early_exit
from funcspec.drafters.fallback import Fallback, fallback
from funcspec.drafters.files import load_draft
from funcspec.drafters.fixed import Fixed, fixed
from funcspec.drafters.medusa import Medusa, medusa
from funcspec.drafters.mtp import Mtp, mtp
from funcspec.drafters.ngram import Ngram, ngram
from funcspec.drafters.parallel import Parallel, parallel
from funcspec.drafters.proposals import Proposer, place_proposals
from funcspec.drafters.standalone import Standalone, standalone
from funcspec.drafters.suffix import Suffix, suffix

__all__ = [
    "BestOf",
    "BlockDrafter",
    "Cascade",
    "Drafter",
    "Eagle",
    "Fallback",
    "Fixed",
    "Medusa",
    "Mtp",
    "Ngram",
    "Parallel",
    "Proposer",
    "Standalone",
    "Suffix",
    "argmax",
    "best_of",
    "cascade",
    "dflash",
    "eagle",
    "early_exit",
    "fallback",
    "fixed",
    "load_draft",
    "medusa",
    "mtp",
    "ngram",
    "parallel",
    "place_proposals",
    "standalone",
    "suffix",
]
