"""LongStraw: GRPO on very long prompts, with the full-sequence gradient.

The engine runs a shared prompt once without a graph, keeps only the state that later tokens read,
replays one response at a time, and runs the prompt's own backward chunk by chunk.

Names are loaded when they are first used, so that the command line starts without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends import Backend, TorchBackend
    from .backends.deepspeed import DeepSpeedBackend, bound_collectives, prepare_deepspeed
    from .config import EngineConfig
    from .distributed import RankAxes, RankWatch, SequenceGroup, rank_axes
    from .distributed.launch import check_ranks, connect_cpu_ranks, launched_ranks
    from .drift import PromptDrift
    from .engine import Engine
    from .errors import (
        ConfigError,
        DataError,
        LongStrawError,
        MemoryPlanError,
        PageFileError,
        PageRoomError,
        PromptStateError,
        RankLostError,
        RanksAbortedError,
        ReplayMismatchError,
        ShapeError,
        StalePromptStateError,
        UnsupportedModelError,
        is_of_the_group,
    )
    from .members import GroupScores
    from .models import SERVED_FAMILIES, RouterSums, load_balancing_loss
    from .reports import FinalizeReport, UpdateReport
    from .rollout import generate, generate_rows
    from .segments import PromptGroup, Segment

__version__ = "0.1.0"

_HOME = {
    "RanksAbortedError": "errors",
    "RankLostError": "errors",
    "ReplayMismatchError": "errors",
    "FinalizeReport": "reports",
    "PromptDrift": "drift",
    "check_ranks": "distributed.launch",
    "connect_cpu_ranks": "distributed.launch",
    "launched_ranks": "distributed.launch",
    "bound_collectives": "backends.deepspeed",
    "prepare_deepspeed": "backends.deepspeed",
    "RankAxes": "distributed",
    "RankWatch": "distributed",
    "SequenceGroup": "distributed",
    "rank_axes": "distributed",
    "DeepSpeedBackend": "backends.deepspeed",
    "TorchBackend": "backends",
    "Backend": "backends",
    "SERVED_FAMILIES": "models",
    "ConfigError": "errors",
    "DataError": "errors",
    "Engine": "engine",
    "EngineConfig": "config",
    "GroupScores": "members",
    "LongStrawError": "errors",
    "MemoryPlanError": "errors",
    "PageFileError": "errors",
    "PageRoomError": "errors",
    "PromptGroup": "segments",
    "PromptStateError": "errors",
    "RouterSums": "models",
    "Segment": "segments",
    "ShapeError": "errors",
    "StalePromptStateError": "errors",
    "UnsupportedModelError": "errors",
    "UpdateReport": "reports",
    "generate": "rollout",
    "generate_rows": "rollout",
    "is_of_the_group": "errors",
    "load_balancing_loss": "models",
}

__all__ = [
    "SERVED_FAMILIES",
    "Backend",
    "ConfigError",
    "DataError",
    "DeepSpeedBackend",
    "Engine",
    "EngineConfig",
    "FinalizeReport",
    "GroupScores",
    "LongStrawError",
    "MemoryPlanError",
    "PageFileError",
    "PageRoomError",
    "PromptDrift",
    "PromptGroup",
    "PromptStateError",
    "RankAxes",
    "RankLostError",
    "RankWatch",
    "RanksAbortedError",
    "ReplayMismatchError",
    "RouterSums",
    "Segment",
    "SequenceGroup",
    "ShapeError",
    "StalePromptStateError",
    "TorchBackend",
    "UnsupportedModelError",
    "UpdateReport",
    "bound_collectives",
    "check_ranks",
    "connect_cpu_ranks",
    "generate",
    "generate_rows",
    "is_of_the_group",
    "launched_ranks",
    "load_balancing_loss",
    "prepare_deepspeed",
    "rank_axes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
