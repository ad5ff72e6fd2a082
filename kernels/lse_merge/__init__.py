"""Merging attention results over disjoint sets of keys; see `merge_lse_`."""

from .reference import add_sink, merge_lse_

__all__ = ["add_sink", "merge_lse_"]
