"""The plain full-sequence step, and measurements that compare the engine with it."""

from .full_sequence import full_sequence_scores, full_sequence_step
from .memory import PeakTensorBytes
from .precision import Float64Islands
from .sparse_definition import selections, ties_decided

__all__ = [
    "Float64Islands",
    "PeakTensorBytes",
    "full_sequence_scores",
    "full_sequence_step",
    "selections",
    "ties_decided",
]
