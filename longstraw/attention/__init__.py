"""Attention over pages: the exact backward, and its registration with transformers."""

from .paged import AttentionOptions, paged_attention
from .registration import ATTENTION_NAME, paged_attention_on

__all__ = ["ATTENTION_NAME", "AttentionOptions", "paged_attention", "paged_attention_on"]
