"""The command, for what people see of a service by it."""

from tests.cli.conftest import unfuse

__all__ = ["unfuse"]
