# SPDX-License-Identifier: Apache-2.0
"""What autocast does to matrix products, for operators that it does not know."""

import torch
from torch import Tensor

__all__ = ['autocast_dtype', 'to_autocast']


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast multiplies ``x``; ``None`` where it leaves ``x`` alone.

    That is where it is off, on devices that have none, such as meta, and for float64.
    """
    kind = x.device.type
    if x.dtype is torch.float64 or kind not in ('cpu', 'cuda'):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def to_autocast(x: Tensor) -> Tensor:
    """What autocast would make of the input of a linear layer, made once for several layers."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)
