"""Mask tokens: what drafters check that guess several tokens in one pass."""

from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import Array, Model


def check_mask(mask_id: object) -> None:
    """Refuse what is no token id.

    Raises:
        ArgumentError: None, or a negative number.
        ArgumentTypeError: no int.
    """
    expected, fix = "the id of the draft's mask token", "pass the id that the draft was trained with"
    if mask_id is None:
        refuse("mask_id", expected, None, fix)
    if not isinstance(mask_id, int) or isinstance(mask_id, bool):
        refuse("mask_id", expected, f"{mask_id!r} ({type(mask_id).__name__})", fix, ArgumentTypeError)
    if mask_id < 0:
        refuse("mask_id", "0 or more", mask_id, fix)


def check_mask_is_readable(mask_id: int, model: Model, token_ids: Array | None, target: Model) -> None:
    """Refuse a mask token that the draft's embedding does not have.

    Raises:
        ModelError: names the id and the number of ids that the draft can read.
    """
    readable = getattr(model, "input_vocab_size", model.vocab_size if token_ids is None else target.vocab_size)
    if mask_id >= readable:
        fix = "pass the id that the draft was trained with"
        refuse("mask_id", f"an id that the draft can read, below {readable}", mask_id, fix, ModelError)


__all__ = ["check_mask", "check_mask_is_readable"]
