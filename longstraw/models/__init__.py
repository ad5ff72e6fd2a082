"""The model as the engine sees it: a decoder run chunk by chunk, a head, routing statistics."""

from .decoder import Decoder, PolicyVersion
from .registry import SERVED_FAMILIES, check_model
from .router import RouterSums, load_balancing_loss, router_sums
from .scoring import TokenCotangents, TokenScores, score_anchor, score_tokens

__all__ = [
    "SERVED_FAMILIES",
    "Decoder",
    "PolicyVersion",
    "RouterSums",
    "TokenCotangents",
    "TokenScores",
    "check_model",
    "load_balancing_loss",
    "router_sums",
    "score_anchor",
    "score_tokens",
]
