"""Attention of a chunk over the pages before it and its own keys, with an exact backward.

Pages are read one at a time and never concatenated. They are no autograd inputs: the backward
leaves their gradients on the pages as a side effect. An input would keep every page of the history
alive on the device for the whole backward, and its gradient would be a tensor as large as the
history for each chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw_kernels.lse_merge import add_sink, merge_lse_
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

    Blocks are computed in the dtype of the inputs and put together in fp32 (fp64 for fp64), so half
    precision rounds here what it rounds in attention over all keys at once. Gradients reach query,
    key, value and sink; those of pages with `needs_cotangent` are added to the pages. The backward
    may run once per forward.

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
        kept = handle.kept.take() if handle.kept is not None else None
        out, lse = kept or _attend(blocks, query, key, value, sink)
        if kept is None and handle.kept is not None:
            handle.kept.put(out.detach(), lse)
        ctx.save_for_backward(query, key, value, sink, out, lse)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        query, key, value, sink, out, lse = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        assert not blocks.handle.row_runs, "rows of different histories are for decoding"
        q, k, v = _in_one_dtype(query, key, value)
        saved = _Saved(q, grad_output.to(q.dtype).contiguous(), out.to(q.dtype), lse)
        with torch.autocast(query.device.type, enabled=False):
            dq, dk, dv = blocks.own_backward(saved, k, v)
            for rows, pages in blocks.visible_pages():
                rows.add_gradients(dq, saved, pages)
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # p_sink = exp(sink - lse) takes probability and gives no value: ds = -p_sink * delta.
            delta = (grad_output.to(lse.dtype) * out).sum(-1)
            p_sink = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
            dsink = -(p_sink * delta).sum((0, 2)).to(sink.dtype)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dsink, None, None


def _attend(
    blocks: "_Blocks", query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`out` in the query's dtype and `lse`, over all pages, own keys and the sink."""
    q, k, v = _in_one_dtype(query, key, value)
    # Autocast would run the products of the definition in half precision.
    with torch.autocast(query.device.type, enabled=False):
        out, lse = blocks.own_forward(q, k, v)
        for rows, pages in blocks.visible_pages():
            part = rows.attend(q, pages)
            if part is not None:
                merge_lse_(out, lse, *part)
        blocks.attend_row_runs(q, out, lse)
    if sink is not None:
        out, lse = add_sink(out, lse, sink)
    return out.to(query.dtype), lse


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Under autocast the rotary embedding leaves queries and keys in fp32 and values in bf16.
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype)


@dataclass(frozen=True)
class _Saved:
    """What the backward of every block reads: queries, and the merged result.

    `lse` is in fp32 (fp64 for fp64), and so is what adds up over blocks; the rest is in one dtype.
    """

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

    def attend_row_runs(self, q: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge into `out` and `lse` what only some rows read."""
        for run in self.handle.row_runs:
            # Every page lies before every query, so positions matter to a window only.
            for part in [run] if self.options.window is None else run.by_shift:
                handle = LayerHandle(
                    part.pages,
                    self.handle.store,
                    self.handle.q_start - part.shifts[0],
                    self.handle.own_start,
                    self.handle.impl,
                )
                queries = q[part.rows]
                blocks = _Blocks(handle, self.options, queries.shape)
                for rows, pages in blocks.visible_pages():
                    found = rows.attend(queries, pages)
                    if found is not None:
                        merged = out[part.rows], lse[part.rows]
                        merge_lse_(*merged, *found)
                        out[part.rows], lse[part.rows] = merged

    def own_forward(self, q: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`(out, lse)` over the own keys, in the dtype of sums and the caller's to write to."""
        params = self.params(self.handle.own_start, causal=self._own_is_causal(key))
        if self.options.softcap is None and not params.is_windowed:
            return _as_sum(*block_attention(q, key, value, params, impl=self.handle.impl))
        # Only the reference can do it, whose scores of all own keys at once would be [T, T'].
        merged = None
        for tile in self._own_tiles(key):
            tile_params = self.params(self.handle.own_start + tile.start, causal=True)
            part = block_attention(
                q, key[..., tile, :], value[..., tile, :], tile_params, impl=self.handle.impl
            )
            merged = _merged(merged, part)
        assert merged is not None, "a chunk without tokens"
        return merged

    def own_backward(
        self, saved: _Saved, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of the own keys; dQ in the dtype of sums and the caller's to write to."""
        params = self.params(self.handle.own_start, causal=self._own_is_causal(key))
        if self.options.softcap is None and not params.is_windowed:
            dq, dk, dv = self.block_backward(saved, key, value, params)
            return dq.to(saved.lse.dtype), dk, dv
        dq, dks, dvs = torch.zeros_like(saved.q, dtype=saved.lse.dtype), [], []
        for tile in self._own_tiles(key):
            tile_params = self.params(self.handle.own_start + tile.start, causal=True)
            part, dk, dv = self.block_backward(
                saved, key[..., tile, :], value[..., tile, :], tile_params
            )
            dq += part.to(dq.dtype)
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
            merged = _merged(merged, part)
        if merged is None:
            return None
        out, lse = merged
        return self._leave(out), self._leave(lse.unsqueeze(-1)).squeeze(-1)

    def add_gradients(self, dq: Tensor, saved: _Saved, pages: list[Page]) -> None:
        """Add the pages' part to `dq`; leaves dK and dV on pages that need them."""
        if not pages:
            return
        entered = _Saved(
            self._enter(saved.q),
            self._enter(saved.grad_out),
            self._enter(saved.out),
            self._enter(saved.lse.unsqueeze(-1)).squeeze(-1),
        )
        total = torch.zeros_like(entered.q, dtype=dq.dtype) if self.fold else dq
        store = self.blocks.handle.store
        for page, key, value in store.read(pages, dq.device, saved.q.dtype, with_cotangents=True):
            params = self.blocks.params(page.start, causal=False)
            part, dk, dv = self.blocks.block_backward(entered, key, value, params)
            total += part.to(total.dtype)
            if page.needs_cotangent:
                store.add_cotangent(page, dk.to(dq.dtype), dv.to(dq.dtype))
        if self.fold:
            dq += self._leave(total)

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


def _as_sum(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A block's result as the first of a sum: `out` as wide as `lse`."""
    return out.to(lse.dtype), lse


def _merged(
    merged: tuple[Tensor, Tensor] | None, part: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """`part` merged into `merged`, which is written to; None is nothing yet."""
    if merged is None:
        return _as_sum(*part)
    merge_lse_(*merged, *part)
    return merged
