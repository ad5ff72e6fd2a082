"""Timing the parts of an update, and the full-sequence step beside them."""

from .cases import CASES, Case, Shape
from .measure import Measurement, measure

__all__ = ["CASES", "Case", "Measurement", "Shape", "measure"]
