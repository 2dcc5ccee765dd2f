"""Models: the protocol, and ways to make one."""

from funcspec.models.base import ForwardBatch, KVEntry, KVSpec, Model
from funcspec.models.functions import from_logits
from funcspec.models.huggingface import HuggingFaceModel, huggingface
from funcspec.models.shared_vocabulary import match_vocabularies, shared_vocabulary
from funcspec.models.toy import ChecksumDraft, ChecksumModel, TableModel

__all__ = [
    "ChecksumDraft",
    "ChecksumModel",
    "ForwardBatch",
    "HuggingFaceModel",
    "KVEntry",
    "KVSpec",
    "Model",
    "TableModel",
    "from_logits",
    "huggingface",
    "match_vocabularies",
    "shared_vocabulary",
]
