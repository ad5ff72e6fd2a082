"""LongStraw: GRPO on very long prompts, with the full-sequence gradient.

The engine runs a shared prompt once without a graph, keeps only the state that later tokens read,
replays one response at a time, and runs the prompt's own backward chunk by chunk.
"""

from .config import EngineConfig
from .engine import Engine, GroupScores, UpdateReport
from .errors import (
    ConfigError,
    DataError,
    LongStrawError,
    MemoryPlanError,
    PromptStateError,
    RankMismatchError,
    ShapeError,
    StalePromptStateError,
    UnsupportedModelError,
)
from .models import SERVED_FAMILIES, RouterSums, load_balancing_loss
from .rollout import generate
from .segments import PromptGroup, Segment

__version__ = "0.1.0"

__all__ = [
    "SERVED_FAMILIES",
    "ConfigError",
    "DataError",
    "Engine",
    "EngineConfig",
    "GroupScores",
    "LongStrawError",
    "MemoryPlanError",
    "PromptGroup",
    "PromptStateError",
    "RankMismatchError",
    "RouterSums",
    "Segment",
    "ShapeError",
    "StalePromptStateError",
    "UnsupportedModelError",
    "UpdateReport",
    "generate",
    "load_balancing_loss",
]
