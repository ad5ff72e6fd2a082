"""What one attention call computes with: its options, and what its backward reads."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionOptions:
    """A layer's attention beside its tensors; see `BlockParams` for the meaning.

    Attributes:
        is_latent: keys and values, own ones and those of pages, are latents `[B, 1, S, r]` and
            rotary keys `[B, 1, S, dr]` of multi-head latent attention in its absorbed form. What a
            query meets is both side by side, and what it takes is the latent.
    """

    softmax_scale: float
    window: int | None = None
    softcap: float | None = None
    is_latent: bool = False

    def operands(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, from what is kept of it."""
        return (torch.cat([key, value], dim=-1), key) if self.is_latent else (key, value)

    def gradients(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Those of what is kept, from those of keys and values."""
        if not self.is_latent:
            return dk, dv
        dim = dv.shape[-1]
        return dk[..., :dim] + dv, dk[..., dim:]


@dataclass(frozen=True)
class Saved:
    """What the backward of every block reads: queries, and the merged result.

    `lse` is in fp32 (fp64 for fp64), and so is what adds up over blocks; the rest is in one dtype.
    """

    q: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor

    def rows(self, rows: slice) -> "Saved":
        """Those of some queries."""
        q, grad_out, out = (x[..., rows, :] for x in (self.q, self.grad_out, self.out))
        return Saved(q, grad_out, out, self.lse[..., rows])
