"""LongStraw: GRPO on very long prompts, with the full-sequence gradient.

The engine runs a shared prompt once without a graph, keeps only the state that later tokens read,
replays one response at a time, and runs the prompt's own backward chunk by chunk.

Names are loaded when they are first used, so that the command line starts without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import Engine, GroupScores, UpdateReport
    from .errors import (
        ConfigError,
        DataError,
        LongStrawError,
        MemoryPlanError,
        PromptStateError,
        ShapeError,
        StalePromptStateError,
        UnsupportedModelError,
    )
    from .models import SERVED_FAMILIES, RouterSums, load_balancing_loss
    from .rollout import generate
    from .segments import PromptGroup, Segment

__version__ = "0.1.0"

_HOME = {
    "SERVED_FAMILIES": "models",
    "ConfigError": "errors",
    "DataError": "errors",
    "Engine": "engine",
    "EngineConfig": "config",
    "GroupScores": "engine",
    "LongStrawError": "errors",
    "MemoryPlanError": "errors",
    "PromptGroup": "segments",
    "PromptStateError": "errors",
    "RouterSums": "models",
    "Segment": "segments",
    "ShapeError": "errors",
    "StalePromptStateError": "errors",
    "UnsupportedModelError": "errors",
    "UpdateReport": "engine",
    "generate": "rollout",
    "load_balancing_loss": "models",
}

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
    "RouterSums",
    "Segment",
    "ShapeError",
    "StalePromptStateError",
    "UnsupportedModelError",
    "UpdateReport",
    "generate",
    "load_balancing_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
