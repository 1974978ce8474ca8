"""A fleet for the libraries: the demo model and a mock of each provider behind one gateway."""

import os

import pytest

# Libraries look for prices, versions and tracing services on the network; there is none.
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LITELLM_TELEMETRY="False",
    LANGSMITH_TRACING="false",
    ANONYMIZED_TELEMETRY="False",
)

from upstreams import fleet  # noqa: E402

# Narrowed by hand while working: only these providers are started.
KINDS = os.environ.get("PENSTOCK_MATRIX", "openai anthropic gemini bedrock").split()


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("clients"), KINDS) as running:
        yield running


@pytest.fixture(params=["pool", *KINDS])
def up(request, everything):
    """Each upstream in turn."""
    return everything.up(request.param)
