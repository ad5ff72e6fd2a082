"""Ranks that work together: who takes which turn, and who has been lost."""

from .lockstep import LockStep, Pass
from .watch import RankWatch

__all__ = ["LockStep", "Pass", "RankWatch"]
