"""A gateway before the demo model and one mock of every provider, for tests that compare them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conversations import Upstream
from harness import Gateway, serving
from providers import Anthropic, Bedrock, Gemini, OpenAi, Provider

CLIENT_KEY = "pk-client-secret"


@dataclass
class Kind:
    """A provider's API: its mock, and its `[[providers]]` table but for id, models and key."""

    protocol: str
    mock: type[Provider]
    base: str = ""
    more: str = ""
    set: dict = field(default_factory=dict)
    # What its API cannot say: refused, or left out by a rule of its reference page.
    refuses: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    names_stop: bool = False


KINDS = {
    "openai": Kind("openai", OpenAi, "/v1"),
    "responses": Kind("openai_responses", OpenAi, "/v1", refuses=frozenset({"stop"})),
    "azure": Kind("azure", OpenAi, "", 'api_version = "2024-10-21"', {"azure": True}),
    "anthropic": Kind("anthropic", Anthropic, "/v1", names_stop=True),
    "gemini": Kind("gemini", Gemini, "/v1beta", refuses=frozenset({"one_call"})),
    "vertex": Kind(
        "vertex",
        Gemini,
        "/v1/projects/p/locations/eu-test-1/publishers/google",
        'project = "p"\nregion = "eu-test-1"',
        {"vertex": True},
        frozenset({"one_call"}),
    ),
    # It says that a stop string was met, not which.
    "bedrock": Kind("bedrock", Bedrock, "", 'region = "eu-test-1"', refuses=frozenset({"one_call"})),
}


def provider_table(name: str, kind: Kind, mock: Provider) -> str:
    """The provider's part of the config file."""
    lines = [
        "[[providers]]",
        f'id = "{name}"',
        f'protocol = "{kind.protocol}"',
        f'base_url = "{mock.url}{kind.base}"',
        f'key_env = "KEY_{name.upper()}"',
        f"models = {list(mock.models)!r}",
        kind.more,
    ]
    return "\n".join(lines).replace("'", '"') + "\n"


def key_of(mock: Provider) -> str:
    """What stands in the environment: for Bedrock, the pair."""
    return f"{mock.access_key}:{mock.key}" if isinstance(mock, Bedrock) else mock.key


def model_of(name: str) -> str:
    """The model of a mock. Bedrock's APIs differ by who made the model: its name says Claude."""
    return "anthropic.claude-mock-v1:0" if name == "bedrock" else f"mock-{name}"


class Fleet:
    """The gateway and its mocks."""

    def __init__(self, gateway: Gateway, mocks: dict[str, Provider]):
        self.gateway, self.mocks = gateway, mocks

    def up(self, name: str, model: str | None = None) -> Upstream:
        """One upstream as a client sees it; its mock forgets what was."""
        if name == "pool":
            return Upstream(
                name,
                self.gateway.url,
                "penstock-demo",
                key=CLIENT_KEY,
                greeting="Hello! How can I help you today?",
                after_tool="It is rainy in Paris, 12 degrees.",
                scripted=False,
                refuses=frozenset({"image"}),
            )
        kind = KINDS[name]
        self.mocks[name].reset()
        return Upstream(
            name,
            self.gateway.url,
            model or model_of(name),
            key=CLIENT_KEY,
            names_stop=kind.names_stop,
            refuses=kind.refuses,
            drops=kind.drops,
        )


@contextlib.contextmanager
def fleet(folder: Path, kinds=tuple(KINDS), more: str = "", pool: bool = True) -> Iterator[Fleet]:
    """Starts all of it."""
    mocks: dict[str, Provider] = {}
    tables, env = ['[[keys]]\nid = "client"\nkey_env = "KEY_CLIENT"\n'], {"KEY_CLIENT": CLIENT_KEY}
    with contextlib.ExitStack() as stack:
        for name in kinds:
            kind = KINDS[name]
            mock = mocks[name] = stack.enter_context(kind.mock())
            mock.models = (model_of(name), f"mock-3-{name}")
            for key, value in kind.set.items():
                setattr(mock, key, value)
            tables.append(provider_table(name, kind, mock))
            env[f"KEY_{name.upper()}"] = key_of(mock)
        if pool:
            tables.append('[[pools]]\nid = "penstock-demo"\n')
        config = "\n".join(tables) + more
        gateway = stack.enter_context(serving(folder, config=config, env=env, workers=1 if pool else 0))
        yield Fleet(gateway, mocks)
