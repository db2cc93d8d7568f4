"""Properties are tried on fewer examples by day; what the tests counted is said at the end."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.chaos.checker import summary
from tests.examples import examples
from tests.forking import Forked
from tools import server

# a busy machine is no failure: what hangs ends by the time limit of its test
settings.register_profile("unfuse", max_examples=examples(40), deadline=None)
settings.load_profile("unfuse")


@pytest.fixture(autouse=True, scope="session")
def one_fork_server(own_settings: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All servers and workers that a test process starts have their compute processes from one fork server.

    They are forked themselves, from a process that has imported `unfuse`. A test about starts or about the fork server
    says `own_forks=True`.
    """
    folder = tmp_path_factory.mktemp("forks")
    server.shared_fork_server = server.SharedForkServer(folder, lambda command, **how: Forked(command[1:], **how))
    yield
    server.shared_fork_server.close()
    server.shared_fork_server = None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the chaos drills and other tests counted, in whichever process they ran."""
    reports = [one for found in terminalreporter.stats.values() for one in found if getattr(one, "when", "") == "call"]
    told = [value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "chaos"]
    if told:
        terminalreporter.section("chaos")
        terminalreporter.write_line(summary(told))
    told = [value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "counted"]
    if told:
        terminalreporter.section("counted")
        terminalreporter.write_line("\n".join(told))
    ordered = sorted(reports, key=lambda report: report.outcome == "failed")  # a failure of a row outweighs a pass
    rows = {value: report.outcome for report in ordered for name, value in report.user_properties if name == "row"}
    if rows:
        terminalreporter.section("rows of public bug reports")
        terminalreporter.write_line("\n".join(f"{row:<28} {outcome}" for row, outcome in sorted(rows.items())))
