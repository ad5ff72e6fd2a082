"""How backwards are driven and gradients finalized."""

from .torch import TorchBackend

__all__ = ["TorchBackend"]
