"""What holds for every test: one compute thread, no network, a data folder of its own, and no settings but its own."""

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
import structlog

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """What a test says of where log lines go holds for it alone."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="session")
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No UNFUSE_ variable of the caller reaches a test or what it starts; a user's data is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("UNFUSE_")]:
            patch.delenv(name)
        patch.setenv("UNFUSE_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        with tempfile.TemporaryDirectory(prefix="run-") as run:  # pytest's own folders have paths too long for sockets
            patch.setenv("UNFUSE_RUN_DIR", run)
            yield
