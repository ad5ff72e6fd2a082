"""The plain full-sequence step, and measurements that compare the engine with it."""

from .full_sequence import full_sequence_scores, full_sequence_step
from .memory import PeakTensorBytes

__all__ = ["PeakTensorBytes", "full_sequence_scores", "full_sequence_step"]
