"""Fixtures of the learning tests."""

import importlib.util
import sys
from pathlib import Path

import pytest
