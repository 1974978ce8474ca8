"""Every official SDK with every upstream: the same conversations, whole and streamed. What a direction cannot express is refused
or left out by a rule of its reference page, and the cell asserts that."""

import os

import pytest

import conversations
from upstreams import KINDS, fleet

# Narrowed by hand while working: only these upstreams are started.
ONLY = os.environ.get("PENSTOCK_MATRIX", "").split()
FLEET = {"kinds": tuple(name for name in KINDS if not ONLY or name in ONLY)}


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("matrix"), **FLEET) as running:
        yield running


@pytest.mark.parametrize(("dialect", "ability", "stream"), conversations.cells())
@pytest.mark.parametrize("upstream", ["pool", *FLEET["kinds"]])
def test_a_conversation(everything, upstream, dialect, ability, stream):
    up = everything.up(upstream)
    conversations.run(up, dialect, ability, stream)
    if upstream != "pool":
        mock = everything.mocks[upstream]
        assert not [seen.refused for seen in mock.seen if seen.refused], "the provider was asked what it cannot do"
