"""Merging attention results over disjoint sets of keys; see `merge_lse`."""

from .reference import add_sink, merge_lse

__all__ = ["add_sink", "merge_lse"]
