"""A page: keys and values of consecutive tokens in one layer, and the cotangents left on them.

Where attention works on latents these stand in place of the values' and keys' heads. A recurrent
layer has snapshots in their place: all that its later tokens read of the earlier ones. A layer that
selects what attention reads has index keys beside them.

Pages know positions and bytes; they know nothing of models, segments or who reads them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .lanes import Event
from .place import Place


def cotangent_dtype_for(dtype: torch.dtype, setting: str) -> torch.dtype:
    """In what readers add up on pages of `dtype`; `setting` is `EngineConfig.cotangent_dtype`."""
    if setting == "bfloat16":
        return torch.bfloat16
    # Thousands of readers add up here: half precision loses the small ones, see DESIGN.md.
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(eq=False)
class Page:
    """State of up to S consecutive tokens in one layer.

    A page owns its storage: a view would keep the whole projection it was cut from alive. What of
    it is in a file only stands for itself on the meta device: shapes, and no memory.

    Attributes:
        start: absolute position of the first token.
        key: `[B, K, S, D]` on the page's home device; after the rotary embedding. Of latent
            attention the latents, `[B, 1, S, D]`.
        value: `[B, K, S, Dv]`. Of latent attention the rotary keys.
        needs_cotangent: whether readers' backwards leave dL/dkey and dL/dvalue here. False holds
            the page constant.
        cotangent_dtype: in what they add up.
        key_cotangent, value_cotangent: what readers have left so far; None until the first reader.
        written, cotangent_written: the copies to pinned memory that have to be done before key and
            value, or the cotangents, can be read; None where the page was never on its way.
        fetched: the last copy to a device that read the page.
        place: where the page lies in a file; None where it stays in memory.
        is_released: whether the store took the page back; its memory may hold another by now.
    """

    start: int
    key: Tensor
    value: Tensor
    needs_cotangent: bool
    cotangent_dtype: torch.dtype = torch.float32
    key_cotangent: Tensor | None = None
    value_cotangent: Tensor | None = None
    written: Event | None = None
    cotangent_written: Event | None = None
    fetched: Event | None = None
    place: Place | None = None
    is_released: bool = False

    @property
    def num_rows(self) -> int:
        return self.key.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.key.shape[-2]

    @property
    def end(self) -> int:
        """Absolute position after the last token."""
        return self.start + self.num_tokens

    @property
    def state_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.key.nbytes + self.value.nbytes

    @property
    def cotangent_bytes(self) -> int:
        """Bytes that the cotangents take, or would take."""
        return (self.key.numel() + self.value.numel()) * self.cotangent_dtype.itemsize

    @property
    def full_bytes(self) -> int:
        """Bytes with the cotangents that the page has or is expected to have."""
        has_cotangent = self.needs_cotangent or self.key_cotangent is not None
        return self.state_bytes + (self.cotangent_bytes if has_cotangent else 0)

    @property
    def events(self) -> list[Event]:
        """Behind which no device copies from or to the page's memory."""
        events = (self.written, self.cotangent_written, self.fetched)
        return [event for event in events if event is not None]

    @property
    def nbytes(self) -> int:
        tensors = (self.key, self.value, self.key_cotangent, self.value_cotangent)
        return sum(t.nbytes for t in tensors if t is not None)

    def read(self, device: torch.device, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Key and value on `device` in `dtype` (None: in their own); the page itself where nothing
        has to change.

        Blocks until the page is written. `PageStore.read` does not, and reads ahead.
        """
        if self.written is not None:
            self.written.synchronize()
        return (
            self.key.to(device, dtype or self.key.dtype, non_blocking=True),
            self.value.to(device, dtype or self.value.dtype, non_blocking=True),
        )

    def cotangents(self) -> tuple[Tensor, Tensor]:
        """What readers left, zeros where nobody read. Blocks until the last has left it."""
        if self.cotangent_written is not None:
            self.cotangent_written.synchronize()
        if self.key_cotangent is None or self.value_cotangent is None:
            dtype = self.cotangent_dtype
            return torch.zeros_like(self.key, dtype=dtype), torch.zeros_like(
                self.value, dtype=dtype
            )
        return self.key_cotangent, self.value_cotangent


@dataclass(eq=False)
class Snapshot(Page):
    """State of a recurrent layer behind a chunk. It stands for all tokens up to there.

    A page in all that concerns memory, with two other tensors. They hold no single tokens, so that
    a reader takes the last snapshot before it and no other.

    Attributes:
        start: absolute position of the first token behind it.
        key: the recurrent state, `[B, Hv, Dk, Dv]`, in fp32 (fp64 for fp64).
        value: the last inputs of the convolution, `[B, channels, kernel - 1]`.
    """

    @property
    def num_tokens(self) -> int:
        """None of its own."""
        return 0


@dataclass(eq=False)
class IndexKeys(Page):
    """What an indexer reads of tokens to select among them. A selection has no gradient.

    Attributes:
        key: the part after the rotary embedding, `[B, 1, S, Dr]`.
        value: the rest, `[B, 1, S, D - Dr]`.
    """
