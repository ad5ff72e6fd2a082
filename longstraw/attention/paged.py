"""Attention of a chunk over the pages before it and its own keys, with an exact backward.

Pages are read one at a time and never concatenated. They are no autograd inputs: the backward
leaves their gradients on the pages as a side effect. An input would keep every page of the history
alive on the device for the whole backward, and its gradient would be a tensor as large as the
history for each chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw_kernels.lse_merge import add_sink, merge_lse
from longstraw_kernels.page_attention import (
    BlockParams,
    block_attention,
    block_attention_backward,
)

from ..state import LayerHandle, Page


@dataclass(frozen=True)
class AttentionOptions:
    """A layer's attention beside its tensors; see `BlockParams` for the meaning."""

    softmax_scale: float
    window: int | None = None
    softcap: float | None = None


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    handle: LayerHandle,
    options: AttentionOptions,
) -> Tensor:
    """Attend to the history's pages and causally to the own keys.

        out = softmax(scale * q [k_history; k_own]^T + causal mask) [v_history; v_own]

    Computed in fp32 (fp64 for fp64 inputs). Gradients reach query, key, value and sink; those of
    pages with `needs_cotangent` are added to the pages. The backward may run once per forward.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, K, T', D]`, the own tokens; T' > T when decoding.
        sink: `[H]` or None, a learned logit per head without a value.
        handle: the history and the positions.
        options: scale, window and softcap.

    Returns:
        `[B, H, T, Dv]` in the query's dtype.
    """
    return _PagedAttention.apply(query, key, value, sink, handle, options)  # type: ignore[no-any-return]


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sink, handle, options):  # type: ignore[no-untyped-def]
        blocks = _Blocks(handle, options, query.shape)
        q = query.to(_compute_dtype(query))
        # Autocast would run the products of the definition in half precision.
        with torch.autocast(query.device.type, enabled=False):
            out, lse = blocks.own_forward(q, key.to(q.dtype), value.to(q.dtype))
            for rows, pages in blocks.visible_pages():
                part = rows.attend(q, pages)
                if part is not None:
                    out, lse = merge_lse(out, lse, *part)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        ctx.save_for_backward(query, key, value, sink, out, lse)
        ctx.blocks = blocks
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        query, key, value, sink, out, lse = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        q, grad_out = query.to(out.dtype), grad_output.to(out.dtype).contiguous()
        saved = _Saved(q, grad_out, out, lse)
        with torch.autocast(query.device.type, enabled=False):
            dq, dk, dv = blocks.own_backward(saved, key.to(q.dtype), value.to(q.dtype))
            for rows, pages in blocks.visible_pages():
                dq = rows.add_gradients(dq, saved, pages)
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # p_sink = exp(sink - lse) takes probability and gives no value: ds = -p_sink * delta.
            delta = (grad_out * out).sum(-1)
            p_sink = torch.exp(sink.to(out.dtype).view(1, -1, 1) - lse)
            dsink = -(p_sink * delta).sum((0, 2)).to(sink.dtype)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dsink, None, None


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Saved:
    """What the backward of every block reads: queries, and the merged result."""

    q: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor


class _Blocks:
    """The key blocks one attention call reads: pages of the history, and the own keys."""

    def __init__(self, handle: LayerHandle, options: AttentionOptions, shape: torch.Size) -> None:
        self.handle = handle
        self.options = options
        self.batch, _, self.q_len, _ = shape

    def params(self, k_start: int, causal: bool) -> BlockParams:
        return BlockParams(
            softmax_scale=self.options.softmax_scale,
            q_start=self.handle.q_start,
            q_len=self.q_len,
            k_start=k_start,
            causal=causal,
            window=self.options.window,
            softcap=self.options.softcap,
        )

    def visible_pages(self) -> "list[tuple[_Rows, list[Page]]]":
        """Pages the window leaves, those shared by all rows apart from those of each row."""
        first = 0
        if self.options.window is not None:
            first = self.handle.q_start - self.options.window + 1
        pages = [page for page in self.handle.history if page.end > first]
        shared = [page for page in pages if page.num_rows == 1]
        own = [page for page in pages if page.num_rows > 1]
        return [(_Rows(self, fold=True), shared), (_Rows(self, fold=False), own)]

    def own_forward(self, q: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        params = self.params(self.handle.own_start, causal=self._own_is_causal(key))
        if self.options.softcap is None and not params.is_windowed:
            return block_attention(q, key, value, params, impl=self.handle.impl)
        # Only the reference can do it, whose scores of all own keys at once would be [T, T'].
        out, lse = q.new_zeros(*q.shape[:-1], value.shape[-1]), q.new_full(q.shape[:-1], -torch.inf)
        for tile in self._own_tiles(key):
            tile_params = self.params(self.handle.own_start + tile.start, causal=True)
            part = block_attention(
                q, key[..., tile, :], value[..., tile, :], tile_params, impl=self.handle.impl
            )
            out, lse = merge_lse(out, lse, *part)
        return out, lse

    def own_backward(
        self, saved: _Saved, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        params = self.params(self.handle.own_start, causal=self._own_is_causal(key))
        if self.options.softcap is None and not params.is_windowed:
            return self.block_backward(saved, key, value, params)
        dq, dks, dvs = torch.zeros_like(saved.q), [], []
        for tile in self._own_tiles(key):
            tile_params = self.params(self.handle.own_start + tile.start, causal=True)
            part, dk, dv = self.block_backward(
                saved, key[..., tile, :], value[..., tile, :], tile_params
            )
            dq += part
            dks.append(dk)
            dvs.append(dv)
        return dq, torch.cat(dks, dim=-2), torch.cat(dvs, dim=-2)

    def block_backward(
        self, saved: _Saved, key: Tensor, value: Tensor, params: BlockParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        return block_attention_backward(
            saved.grad_out,
            saved.q,
            key,
            value,
            saved.out,
            saved.lse,
            params,
            impl=self.handle.impl,
        )

    def _own_is_causal(self, key: Tensor) -> bool:
        # One query at the end of the own keys sees all of them; a mask would only cost.
        return not (
            self.q_len == 1 and self.handle.own_start + key.shape[-2] - 1 == self.handle.q_start
        )

    def _own_tiles(self, key: Tensor) -> list[slice]:
        size = self.handle.store.page_size
        return [slice(i, i + size) for i in range(0, key.shape[-2], size)]


class _Rows:
    """How the batch's queries meet a set of pages.

    Shared pages (one row, read by all members) see the members' queries laid side by side, so that
    a page is visited once for all of them; pages of a batch meet their own row's queries.
    """

    def __init__(self, blocks: _Blocks, fold: bool) -> None:
        self.blocks = blocks
        self.fold = fold and blocks.batch > 1

    def attend(self, q: Tensor, pages: list[Page]) -> tuple[Tensor, Tensor] | None:
        """`(out, lse)` over the pages, in the batch's layout; None if there is no page."""
        queries, merged = self._enter(q), None
        for page, key, value in self.blocks.handle.store.read(pages, q.device, q.dtype):
            params = self.blocks.params(page.start, causal=False)
            part = block_attention(queries, key, value, params, impl=self.blocks.handle.impl)
            merged = part if merged is None else merge_lse(*merged, *part)
        if merged is None:
            return None
        out, lse = merged
        return self._leave(out), self._leave(lse.unsqueeze(-1)).squeeze(-1)

    def add_gradients(self, dq: Tensor, saved: _Saved, pages: list[Page]) -> Tensor:
        """`dq` plus the pages' part; leaves dK and dV on pages that need them."""
        if not pages:
            return dq
        entered = _Saved(
            self._enter(saved.q),
            self._enter(saved.grad_out),
            self._enter(saved.out),
            self._enter(saved.lse.unsqueeze(-1)).squeeze(-1),
        )
        total = torch.zeros_like(entered.q)
        store = self.blocks.handle.store
        for page, key, value in store.read(pages, dq.device, dq.dtype, with_cotangents=True):
            params = self.blocks.params(page.start, causal=False)
            part, dk, dv = self.blocks.block_backward(entered, key, value, params)
            total += part
            if page.needs_cotangent:
                store.add_cotangent(page, dk, dv)
        return dq + self._leave(total)

    def _enter(self, x: Tensor) -> Tensor:
        """`[B, H, T, D]` -> `[1, H, B*T, D]` when folding."""
        if not self.fold:
            return x
        return x.transpose(0, 1).reshape(1, x.shape[1], -1, x.shape[-1])

    def _leave(self, x: Tensor) -> Tensor:
        """The inverse of `_enter`."""
        if not self.fold:
            return x
        return x.view(x.shape[1], self.blocks.batch, -1, x.shape[-1]).transpose(0, 1)
