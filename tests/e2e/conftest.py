"""One gateway for all tests that only talk to it; tests that break things start their own."""

import pytest

from harness import Gateway, serving

# Files that take longest, longest first. They start first, so that the processes that share the files end together.
LONGEST = [
    "test_console",
    "test_console_oidc_provider",
    "test_conversations",
    "test_shared_budget",
    "test_tiers",
    "test_replicas",
    "test_hostile_memory",
    "test_world",
    "test_lost_lead",
    "test_gpu",
    "test_reload",
    "test_pool_limits",
    "test_stores",
    "test_on_demand",
    "test_admin",
    "test_shared_weights",
]


class FailuresAtOnce:
    """Names each failed test when it fails: a run that is cut short would name none."""

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_line(f"failed: {report.nodeid} ({report.when}, {report.duration:.0f} s)")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def gateway(tmp_path_factory) -> Gateway:
    with serving(tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def client(gateway):
    return gateway.client()


@pytest.fixture(scope="session")
def model(gateway) -> str:
    return gateway.model()
