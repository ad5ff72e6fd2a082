"""Attention over pages: the exact backward, and its registration with transformers."""

from .operands import AttentionOptions
from .paged import paged_attention
from .registration import ATTENTION_NAME, attend_with, required_handle
from .selection import select_tokens

__all__ = [
    "ATTENTION_NAME",
    "AttentionOptions",
    "attend_with",
    "paged_attention",
    "required_handle",
    "select_tokens",
]
