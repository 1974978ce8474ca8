"""A server that somebody else wrote, behind us: every official SDK, every ability. Started by `foreign.sh`."""

import os

import pytest

import conversations
from conversations import Upstream
from harness import serving

KEY, URL, MODEL = os.environ["FOREIGN_KEY"], os.environ["FOREIGN_URL"], os.environ["FOREIGN_MODEL"]
CONFIG = f"""
[[providers]]
id = "foreign"
base_url = "{URL}"
key_env = "FOREIGN_KEY"
models = ["{MODEL}"]
"""
# The demo model sees no images, and calls one tool at a time.
REFUSED = frozenset({"image"})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("foreign"), config=CONFIG, workers=0) as running:
        yield running


@pytest.mark.parametrize(("dialect", "ability", "stream"), conversations.cells())
def test_a_conversation(gateway, dialect, ability, stream):
    up = Upstream(
        "foreign",
        gateway.url,
        MODEL,
        greeting="Hello! How can I help you today?",
        after_tool="It is rainy in Paris, 12 degrees.",
        scripted=False,
        untouched=dialect == "chat",
        refuses=REFUSED,
        # It is started without a reasoning parser: that of vLLM for Qwen3 takes every answer of this model for reasoning.
        drops=frozenset({"thinking"}),
    )
    conversations.run(up, dialect, ability, stream)
