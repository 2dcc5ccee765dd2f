"""Drafters: the protocol, and one file for each kind."""

from funcspec.drafters.base import Drafter
from funcspec.drafters.standalone import Standalone, standalone

__all__ = ["Drafter", "Standalone", "standalone"]
