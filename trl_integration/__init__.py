"""LongStraw as a TRL trainer: the same arguments as `GRPOTrainer`, two names changed."""

from .checkpoints import CheckpointError
from .config import LongStrawGRPOConfig
from .trainer import LongStrawGRPOTrainer

__all__ = ["CheckpointError", "LongStrawGRPOConfig", "LongStrawGRPOTrainer"]
