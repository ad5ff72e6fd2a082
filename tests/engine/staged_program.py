"""A program of captures, visits and releases, as the engine makes them, on any page store."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from longstraw.state import Page, PageStore

CPU = torch.device("cpu")


class Program:
    """Captures, reads, adds and releases as the engine does, on a store and with a queue."""

    def __init__(
        self,
        store: PageStore,
        compute: Callable[[Callable], object],
        device: torch.device = CPU,
    ) -> None:
        self.store = store
        self.compute = compute
        self.device = device
        self.results: list[Tensor] = []
        self.random = torch.Generator().manual_seed(0)

    def run(self) -> list[Tensor]:
        for shape, dtype in [
            ((1, 2, 6, 8), torch.float32),
            ((1, 2, 9, 8), torch.bfloat16),
            ((3, 2, 5, 8), torch.float32),  # larger pages: slots grow between visits
        ]:
            chunks: list[list[Page]] = []
            for _ in range(4):
                self.forward([page for chunk in chunks for page in chunk])
                chunks.append(self.capture(shape, dtype))
            for member in range(3):
                pages = [page for chunk in chunks for page in chunk]
                self.backward(pages[: None if member else 1], scale=member + 1.0)
            self.break_off(pages)
            while chunks:
                self.prompt_backward(chunks)
            pages = self.capture(shape, dtype)
            self.break_off(pages)
            self.store.release(pages)  # the last ones: the slots are given up as well
        return self.results

    def tensor(self, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that has its value when the compute lane has come so far."""
        out = torch.full(shape, torch.nan, dtype=dtype, device=self.device)
        self.compute(lambda: out.copy_(make()))
        return out

    def capture(self, shape, dtype) -> list[Page]:
        data = torch.randn(2, *shape, generator=self.random).to(self.device)
        key = self.tensor(shape, dtype, lambda: data[0])
        value = self.tensor(shape, dtype, lambda: data[1])
        return self.store.write(key, value, start=0, needs_cotangent=True)

    def forward(self, pages: list[Page]) -> None:
        for _, key, value in self.visit(pages):
            self.keep(key.shape, lambda k=key, v=value: k.float() + 2 * v.float())

    def backward(self, pages: list[Page], scale: float) -> None:
        for page, key, value in self.visit(pages, with_cotangents=True):
            dk = self.tensor(key.shape, torch.float32, lambda k=key: k.float() * scale)
            dv = self.tensor(key.shape, torch.float32, lambda v=value: v.float() / scale)
            self.store.add_cotangent(page, dk, dv)

    def break_off(self, pages: list[Page]) -> None:
        """A reader that fails after the first page, with the second on its way."""
        for _ in self.visit(pages, with_cotangents=True):
            break

    def prompt_backward(self, chunks: list[list[Page]]) -> None:
        pages = chunks.pop()
        num_tokens = sum(page.num_tokens for page in pages)
        shape = (*pages[0].key.shape[:2], num_tokens, pages[0].key.shape[-1])
        like = torch.empty(shape, dtype=pages[0].key.dtype, device=self.device)
        joined = self.store.join_cotangents(pages, like, like)
        self.store.release(pages)
        for cotangent in joined:
            self.keep(cotangent.shape, lambda c=cotangent: c.float())
        # What it adds to earlier pages lands in buffers that were just released.
        self.backward([page for chunk in chunks for page in chunk], scale=0.5)

    def visit(self, pages: list[Page], **options):
        dtype = pages[0].key.dtype if pages else torch.float32
        return self.store.read(pages, self.device, dtype, **options)

    def keep(self, shape, make: Callable[[], Tensor]) -> None:
        self.results.append(self.tensor(shape, torch.float32, make))


@functools.cache
def expected() -> list[Tensor]:
    """What the program gives where pages are read as they lie."""
    return Program(PageStore(CPU, 4), lambda work: work()).run()
