"""How backwards are driven and gradients finalized."""

from .base import Backend, Finalized
from .torch import TorchBackend

__all__ = ["Backend", "Finalized", "TorchBackend"]
