"""Attention over pages: the exact backward, and its registration with transformers."""

from .paged import AttentionOptions, paged_attention
from .registration import ATTENTION_NAME, attend_with

__all__ = ["ATTENTION_NAME", "AttentionOptions", "attend_with", "paged_attention"]
