"""The tiny models of tests/models."""

from tests.models.conftest import copied, stages, undivided

__all__ = ["copied", "stages", "undivided"]
