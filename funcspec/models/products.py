"""Matrix products with weights, quick for the few rows of a speculative pass.

With few rows a product is a walk over the weights. On a CPU torch's own `x @ w.T` does it badly: it packs the weights anew at
every call. Here fp32 weights are packed once, for oneDNN, and passes of up to four rows are padded to four: one to four tokens
then cost the same, and what is computed for a token does not depend on how many others are in the pass.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

ROWS = 4
"""Passes of fewer rows are padded to this many, where products are packed."""


@dataclass(frozen=True, eq=False)
class Product:
    """x -> x @ weight.T.

    Attributes:
        weight: [outputs, inputs].
        packed: the same for oneDNN, or None where that does not apply.
    """

    weight: torch.Tensor
    packed: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [T, inputs]; the result [T, outputs] is contiguous."""
        if self.packed is None:
            return F.linear(x, self.weight)
        if x.shape[0] >= ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        padded = F.pad(x, (0, 0, 0, ROWS - x.shape[0]))
        return torch.ops.mkldnn._linear_pointwise(padded, self.packed, None, "none", [], "")[: x.shape[0]]


def product(weight: torch.Tensor) -> Product:
    """Prepare a weight: fp32 on a CPU whose torch has oneDNN is packed, anything else is used as it is.

    Packing takes as much memory again as the weight.

    Example:
        >>> import torch
        >>> torch.allclose(product(torch.eye(3))(torch.ones(2, 3)), torch.ones(2, 3))
        True
    """
    return Product(weight, _pack(weight))


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    except (AttributeError, RuntimeError):  # not in every build of torch; plain products serve as well, only slower
        return None
