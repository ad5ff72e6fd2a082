"""Ranks that work together: who shares a prompt, who takes which turn, and who has been lost."""

from .axes import RankAxes, SequenceGroup, rank_axes
from .lockstep import LockStep, Pass
from .ownership import Layout, Ownership, most_owned
from .travel import ChunkTravel, DecodeTravel, Travel
from .watch import RankWatch

__all__ = [
    "ChunkTravel",
    "DecodeTravel",
    "Layout",
    "LockStep",
    "Ownership",
    "Pass",
    "RankAxes",
    "RankWatch",
    "SequenceGroup",
    "Travel",
    "most_owned",
    "rank_axes",
]
