"""What holds for every test: one compute thread, no network, a data folder of its own, and no settings but its own.

A test is `slow` if it starts a process or needs diffusers, which takes seconds to import. Whole folders are, and other
tests that say so. One that does it without saying so fails: `make quick` stays quick.
"""

import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

pytest_plugins = ["tools.run_part", "tools.second_run"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores
# or a thread that waits for the others of its process keeps a core from them: 20 times the time where cores are busy
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = (
    "bench/tests", "tests/answers", "tests/chaos", "tests/integration", "tests/launch/test_launcher_suite.py",
    "tests/launch/test_local.py", "tests/launch/test_strangers.py", "tests/models", "tests/weights",
    "tests/language/test_chat_template.py", "tests/language/test_grammars.py", "tests/language/test_history.py",
    "tests/language/test_parsed_words.py", "tests/language/test_sampling.py", "tests/language/test_special_text.py",
    "tests/language/test_tokenizer.py", "tests/language/test_tool_messages.py",
    "tests/parallel/test_texts.py", "tests/pretend", "tests/stages/test_adapter_alphas.py",
    "tests/stages/test_attention.py",
    "tests/stages/test_language_model.py", "tests/stages/test_noise_state.py",
    "tests/stages/test_whole.py",
    "tests/stores/test_store_conformance.py", "tests/stores/test_two_hosts.py", "tests/tools",
    "tests/transfer/test_strangers.py", "tests/transfer/test_transfer_conformance.py", "tests/worker/test_executor.py",
    "tests/worker/test_leaks.py", "tests/worker/test_schedulers.py",
)  # fmt: skip
"""Where every test is slow, the conformance suites that move gigabytes too; a run without slow tests loads none."""

STARTING = {"idle", "redis", "redis_server", "s3_server", "shared_server", "start"}
"""Fixtures that start a process: a test that asks for one is slow."""

HEAVY = {"diffusers", "transformers"}
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
watched: list[list[str]] = []
"""What was done that is not quick, while a test runs, or a module is loaded, that has to be."""


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    for done in watched[:1]:
        if event in STARTS:
            done.append(f"this starts a process, and is not marked slow: {arguments[:2]}")
        elif event == "import" and arguments[0] in HEAVY:
            done.append(f"this imports {arguments[0]}, and is not marked slow")


platform.processor()  # which starts `uname`, once: libraries ask for it, in whichever test uses them first
sys.addaudithook(watch)


def verdict(report: Any) -> Any:
    """The report of a test or a module that had to be quick: failed if it was not."""
    for done in filter(None, watched):
        report.outcome, report.longrepr = "failed", done[0]
    return report


def only_quick(config: pytest.Config) -> bool:
    return "not slow" in config.option.markexpr


def in_slow_folder(path: Path, root: Path) -> bool:
    return path.is_relative_to(root) and path.relative_to(root).as_posix().startswith(SLOW)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing what slow tests import takes longer than running the others."""
    return (only_quick(config) and in_slow_folder(collection_path, config.rootpath)) or None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    watched[:] = [[]] if only_quick(collector.config) else []
    report = verdict((yield))
    watched.clear()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    watched[:] = [] if item.get_closest_marker("slow") else [[]]
    done = yield
    watched.clear()
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    return verdict(report) if call.when == "teardown" else report


def pytest_itemcollected(item: pytest.Item) -> None:
    fixtures = set(getattr(item, "fixturenames", ()))
    is_by_night = item.get_closest_marker("nightly") is not None
    if is_by_night or in_slow_folder(item.path, item.config.rootpath) or fixtures & STARTING:
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: where several processes share a run, what is done last is short."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """What a test says of where log lines go holds for it alone."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def no_keys(own_settings: Path) -> Iterator[None]:
    """No test makes keys where the tests behind it find them: one that makes keys needs its own folder."""
    yield
    if (keys := own_settings / "keys").exists():
        shutil.rmtree(keys)
        pytest.fail("this test made keys where others find them: it needs its own data folder")


@pytest.fixture(autouse=True, scope="session")
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No UNFUSE_ variable of the caller reaches a test or what it starts; a user's data is left alone.

    The data folder of all tests of a process is given.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("UNFUSE_")]:
            patch.delenv(name)
        data = tmp_path_factory.mktemp("data")
        patch.setenv("UNFUSE_DATA_DIR", str(data))
        with tempfile.TemporaryDirectory(prefix="run-") as run:  # pytest's own folders have paths too long for sockets
            patch.setenv("UNFUSE_RUN_DIR", run)
            yield data
