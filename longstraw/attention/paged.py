"""Attention of a chunk over the pages before it and its own keys, with an exact backward.

Pages are never concatenated: they are read one at a time, or where they lie on the device that
reads by a kernel that takes the list of them. They are no autograd inputs: the backward
leaves their gradients on the pages as a side effect. An input would keep every page of the history
alive on the device for the whole backward, and its gradient would be a tensor as large as the
history for each chunk.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longstraw_kernels.availability import impl_beside
from longstraw_kernels.lse_merge import add_sink, merge_lse_
from longstraw_kernels.page_attention import (
    BlockParams,
    PageParams,
    available_impl,
    block_attention,
    block_attention_backward,
    page_attention,
    page_attention_backward,
)

from ..distributed import Travel
from ..state import Found, LayerHandle, Page, can_add_in_place, read_together
from .operands import AttentionOptions, Saved
from .selected import SelectedRows


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    handle: LayerHandle,
    options: AttentionOptions,
    selection: Tensor | None = None,
) -> Tensor:
    """Attend to the history's pages and causally to the own keys.

        out = softmax(scale * q [k_history; k_own]^T + causal mask) [v_history; v_own]

    Blocks are computed in the dtype of the inputs and put together in fp32 (fp64 for fp64), so half
    precision rounds here what it rounds in attention over all keys at once. Gradients reach query,
    key, value and sink; those of pages with `needs_cotangent` are added to the pages. The backward
    may run once per forward.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, K, T', D]`, the own tokens; T' > T when decoding. Of latent attention what
            is kept of them, see `AttentionOptions`.
        sink: `[H]` or None, a learned logit per head without a value.
        handle: the history and the positions.
        options: scale, window and softcap.
        selection: of latent attention, the tokens that each query reads instead of all; see
            `select_tokens`.

    Returns:
        `[B, H, T, Dv]` in the query's dtype.
    """
    return _PagedAttention.apply(  # type: ignore[no-any-return]
        query, key, value, sink, handle, options, selection
    )


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sink, handle, options, selection):  # type: ignore[no-untyped-def]
        kept = handle.kept.take() if handle.kept is not None else None
        out, lse = kept or _attend(handle, options, query, key, value, sink, selection)
        if kept is None and handle.kept is not None:
            handle.kept.put(out.detach(), lse)
        ctx.save_for_backward(query, key, value, sink, out, lse, selection)
        ctx.handle, ctx.options = handle, options
        return out

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        query, key, value, sink, out, lse, selection = ctx.saved_tensors
        handle: LayerHandle = ctx.handle
        assert not handle.row_runs, "rows of different histories are for decoding"
        q, k, v = _in_one_dtype(query, key, value)
        with torch.autocast(query.device.type, enabled=False):
            saved = _gather(handle.travel, q, grad_output.to(q.dtype), out.to(q.dtype), lse)
            if selection is not None:
                selected = SelectedRows(handle, ctx.options, selection, k, v)
                dq, dk, dv = selected.backward(saved)
            else:
                dq, dk, dv = _Blocks(handle, ctx.options, saved.q).backward(saved, k, v)
            dq = handle.travel.sum_home(dq)
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # p_sink = exp(sink - lse) takes probability and gives no value: ds = -p_sink * delta.
            delta = (grad_output.to(lse.dtype) * out).sum(-1)
            p_sink = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
            dsink = -(p_sink * delta).sum((0, 2)).to(sink.dtype)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dsink, None, None, None


def _attend(
    handle: LayerHandle,
    options: AttentionOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    selection: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`out` in the query's dtype and `lse`, over all pages, own keys and the sink."""
    q, k, v = _in_one_dtype(query, key, value)
    # Autocast would run the products of the definition in half precision.
    with torch.autocast(query.device.type, enabled=False):
        q = handle.travel.gather(q)
        if selection is not None:
            out, lse = SelectedRows(handle, options, selection, k, v).forward(q)
        else:
            out, lse = _Blocks(handle, options, q).forward(q, k, v)
        out, lse = _merge_home(handle, out, lse)
    if sink is not None:
        out, lse = add_sink(out, lse, sink)
    return out.to(query.dtype), lse


def _merge_home(handle: LayerHandle, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What all ranks found for this rank's queries, merged in the order of ranks."""
    travel = handle.travel
    if travel.is_local:
        return out, lse
    # Apart, and not as one tensor: side by side would be one more copy of both.
    outs, lses = travel.parts_home(out), travel.parts_home(lse.unsqueeze(-1)).squeeze(-1)
    out, lse = outs[0].clone(), lses[0].clone()  # views would keep what all ranks have sent
    for part in zip(outs[1:], lses[1:], strict=True):
        merge_lse_(out, lse, *part, impl=impl_beside(handle.impl))
    return out, lse


def _gather(travel: Travel, q: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Saved:
    """What the backward reads, for the queries of all ranks."""
    if travel.is_local:
        return Saved(q, grad_out.contiguous(), out, lse)
    sizes = [x.shape[-1] for x in (q, grad_out, out)]
    whole = travel.gather(torch.cat([q, grad_out, out], dim=-1)).split(sizes, dim=-1)
    q, grad_out, out = (x.contiguous() for x in whole)
    return Saved(q, grad_out, out, travel.gather(lse, dim=-1))


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Under autocast the rotary embedding leaves queries and keys in fp32 and values in bf16.
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype)


class _Blocks:
    """The key blocks one attention call reads: pages of the history, and the own keys."""

    def __init__(self, handle: LayerHandle, options: AttentionOptions, q: Tensor) -> None:
        self.handle = handle
        self.options = options
        self.batch, _, self.q_len, _ = q.shape
        is_auto = handle.impl == "auto"
        self.impl = available_impl(q.device, q.dtype) if is_auto else handle.impl
        # Latents and rotary keys have to be joined, a page at a time.
        self.at_once = self.impl == "triton" and not options.is_latent

    def params(self, k_start: int, causal: bool, rows: slice | None = None) -> BlockParams:
        """Of a block of keys, for all queries or for `rows` of them."""
        first, stop = (0, self.q_len) if rows is None else (rows.start, rows.stop)
        return BlockParams(
            softmax_scale=self.options.softmax_scale,
            q_start=self.handle.q_start + first,
            q_len=stop - first,
            k_start=k_start,
            causal=causal,
            window=self.options.window,
            softcap=self.options.softcap,
        )

    def page_params(self) -> PageParams:
        """Of all queries over pages of the history."""
        return PageParams.of_block(self.params(0, causal=False))

    def visible_pages(self) -> "list[tuple[_Rows, list[Page]]]":
        """Pages the window leaves, those shared by all rows apart from those of each row."""
        first = 0
        if self.options.window is not None:
            first = self.handle.q_start - self.options.window + 1
        pages = [page for page in self.handle.history if page.end > first]
        shared = [page for page in pages if page.num_rows == 1]
        own = [page for page in pages if page.num_rows > 1]
        return [(_Rows(self, fold=True), shared), (_Rows(self, fold=False), own)]

    def merge(self, out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
        """Merge what was found over other keys into `out` and `lse`."""
        merge_lse_(out, lse, *part, impl=impl_beside(self.handle.impl))

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
                blocks = _Blocks(handle, self.options, queries)
                for rows, pages in blocks.visible_pages():
                    found = rows.attend(queries, pages)
                    if found is not None:
                        merged = out[part.rows], lse[part.rows]
                        self.merge(*merged, found)
                        out[part.rows], lse[part.rows] = merged

    def own_blocks(self, num_keys: int) -> Iterator[tuple[slice, slice, BlockParams]]:
        """The own keys that this rank attends to: rows of queries, columns of keys, and how."""
        for columns, place in self.handle.travel.own_runs(num_keys):
            start = self.handle.own_start + place
            everything = self.params(start, causal=True)
            is_masked = self.options.softcap is not None or everything.is_windowed
            size = columns.stop - columns.start
            if self.impl == "triton":
                is_masked = True  # which costs it nothing, and parts would be more launches
            elif is_masked or self.impl == "reference" or self.options.is_latent:
                # The definition, which latents have off the GPU too: its scores of all keys at once
                # are [T, T'].
                size = self.handle.store.page_size
            for first in range(columns.start, columns.stop, max(size, 1)):
                part = slice(first, min(first + size, columns.stop))
                block = self._causal_block if is_masked else self._parted_block
                yield from block(part, start + first - columns.start)

    def _causal_block(
        self, columns: slice, start: int
    ) -> Iterator[tuple[slice, slice, BlockParams]]:
        """All queries from the first key on, under a mask."""
        rows = slice(max(0, start - self.handle.q_start), self.q_len)
        yield rows, columns, self.params(start, True, rows)

    def _parted_block(
        self, columns: slice, start: int
    ) -> Iterator[tuple[slice, slice, BlockParams]]:
        """The queries of the keys' own tokens, and without a mask those of later tokens."""
        num_keys = columns.stop - columns.start
        first = start - self.handle.q_start
        if first < 0:  # decoding: the keys begin before the queries
            # One query at the end of the own keys sees all of them; a mask would only cost.
            is_last = self.q_len == 1 and first + num_keys == 1
            rows = slice(0, self.q_len)
            yield rows, columns, self.params(start, not is_last, rows)
            return
        rows = slice(first, first + num_keys)
        yield rows, columns, self.params(start, num_keys > 1, rows)
        if rows.stop < self.q_len:
            rows = slice(rows.stop, self.q_len)
            yield rows, columns, self.params(start, False, rows)

    def forward(self, q: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`(out, lse)` over all keys of this rank."""
        out, lse = self.own_forward(q, *self.options.operands(key, value))
        for rows, pages in self.visible_pages():
            part = rows.attend(q, pages)
            if part is not None:
                self.merge(out, lse, part)
        self.attend_row_runs(q, out, lse)
        return out, lse

    def backward(self, saved: Saved, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, and dK and dV of the own keys; leaves those of pages that need them there."""
        dq, dk, dv = self.own_backward(saved, *self.options.operands(key, value))
        for rows, pages in self.visible_pages():
            rows.add_gradients(dq, saved, pages)
        return dq, *self.options.gradients(dk, dv)

    def own_forward(self, q: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`(out, lse)` over the own keys, in the dtype of sums and the caller's to write to."""
        blocks = list(self.own_blocks(key.shape[-2]))
        if self._is_one_block(blocks, key):
            return _as_sum(*block_attention(q, key, value, blocks[0][2], impl=self.handle.impl))
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(*q.shape[:-1], value.shape[-1], dtype=dtype)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
        for rows, columns, params in blocks:
            part = block_attention(
                q[..., rows, :],
                key[..., columns, :],
                value[..., columns, :],
                params,
                impl=self.handle.impl,
            )
            self.merge(out[..., rows, :], lse[..., rows], part)
        return out, lse

    def own_backward(
        self, saved: Saved, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of the own keys; dQ in the dtype of sums and the caller's to write to."""
        blocks = list(self.own_blocks(key.shape[-2]))
        sums = saved.lse.dtype
        if self._is_one_block(blocks, key):
            dq, dk, dv = self.block_backward(saved, key, value, blocks[0][2])
            return dq.to(sums), dk, dv
        dq, dk, dv = (torch.zeros_like(x, dtype=sums) for x in (saved.q, key, value))
        for rows, columns, params in blocks:
            part = self.block_backward(
                saved.rows(rows), key[..., columns, :], value[..., columns, :], params
            )
            dq[..., rows, :] += part[0]
            dk[..., columns, :] += part[1]
            dv[..., columns, :] += part[2]
        return dq, dk, dv

    def _is_one_block(self, blocks: list[tuple[slice, slice, BlockParams]], key: Tensor) -> bool:
        everything = (slice(0, self.q_len), slice(0, key.shape[-2]))
        return len(blocks) == 1 and blocks[0][:2] == everything

    def block_backward(
        self, saved: Saved, key: Tensor, value: Tensor, params: BlockParams
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
        for found in self._read(pages, q):
            part = self._attend(queries, found)
            if merged is None:
                merged = _as_sum(*part)
            else:
                self.blocks.merge(*merged, part)
        if merged is None:
            return None
        out, lse = merged
        return self._leave(out), self._leave(lse.unsqueeze(-1)).squeeze(-1)

    def add_gradients(self, dq: Tensor, saved: Saved, pages: list[Page]) -> None:
        """Add the pages' part to `dq`; leaves dK and dV on pages that need them."""
        if not pages:
            return
        entered = Saved(
            self._enter(saved.q),
            self._enter(saved.grad_out),
            self._enter(saved.out),
            self._enter(saved.lse.unsqueeze(-1)).squeeze(-1),
        )
        total = torch.zeros_like(entered.q, dtype=dq.dtype) if self.fold else dq
        for found in self._read(pages, saved.q, with_cotangents=True):
            backward = self._backward_together if self.blocks.at_once else self._backward
            total += backward(entered, found).to(total.dtype)
        if self.fold:
            dq += self._leave(total)

    def _read(
        self, pages: list[Page], like: Tensor, with_cotangents: bool = False
    ) -> Iterator[list[Found]]:
        """Pages on the device and in the dtype of `like`, as many together as can be read so."""
        store = self.blocks.handle.store
        at_once = self.blocks.at_once
        return read_together(store, pages, like.device, like.dtype, at_once, with_cotangents)

    def _attend(self, q: Tensor, found: list[Found]) -> tuple[Tensor, Tensor]:
        if self.blocks.at_once:
            pages, keys, values = zip(*found, strict=True)
            starts = [page.start for page in pages]
            params = self.blocks.page_params()
            return page_attention(q, keys, values, starts, params, impl=self.blocks.impl)
        ((page, key, value),) = found
        block = self.blocks.options.operands(key, value)
        params = self.blocks.params(page.start, causal=False)
        return block_attention(q, *block, params, impl=self.blocks.handle.impl)

    def _backward(self, saved: Saved, found: list[Found]) -> Tensor:
        """dQ of one page; leaves dK and dV on it if it needs them."""
        ((page, key, value),) = found
        options = self.blocks.options
        params = self.blocks.params(page.start, causal=False)
        block = options.operands(key, value)
        dq, *gradients = self.blocks.block_backward(saved, *block, params)
        if page.needs_cotangent:
            dk, dv = (x.to(saved.lse.dtype) for x in options.gradients(*gradients))
            self.blocks.handle.store.add_cotangent(page, dk, dv)
        return dq

    def _backward_together(self, saved: Saved, found: list[Found]) -> Tensor:
        """dQ of some pages; adds dK and dV to the cotangents where they lie, or leaves them."""
        store = self.blocks.handle.store
        pages, keys, values = zip(*found, strict=True)
        in_place = can_add_in_place(store, pages, saved.q.device)
        into: list[tuple[Tensor, Tensor] | None] = []
        for page, key, value in found:
            if not page.needs_cotangent:
                into.append(None)
            elif in_place:
                into.append(store.cotangents_of(page))
            else:
                sums = (torch.zeros_like(x, dtype=saved.lse.dtype) for x in (key, value))
                into.append((next(sums), next(sums)))
        starts = [page.start for page in pages]
        params = self.blocks.page_params()
        dq = page_attention_backward(
            saved.grad_out, saved.q, keys, values, starts, saved.out, saved.lse, params,
            into=into, impl=self.blocks.impl,
        )  # fmt: skip
        for page, sums in zip(pages, into, strict=True):
            if sums is not None and not in_place:
                store.add_cotangent(page, *sums)
        return dq

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
