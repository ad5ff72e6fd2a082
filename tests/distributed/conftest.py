"""Fixtures that these tests share with those against TRL."""

from tests.trl.conftest import model_path

__all__ = ["model_path"]
