"""One gateway for all tests that only talk to it; tests that break things start their own."""

import pytest

from harness import Gateway, serving


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
