"""Every example of configs/examples starts, with mocks where its providers are, and answers on every name that it lists."""

import contextlib
import re
import tomllib
from urllib.parse import urlsplit

import pytest

from harness import ROOT, serving, user
from providers import Bedrock
from upstreams import KINDS, key_of

EXAMPLES = sorted((ROOT / "configs" / "examples").glob("*.toml"))


@contextlib.contextmanager
def mocked(text: str):
    """The example with the addresses of mocks, and the environment that it reads."""
    config, env = tomllib.loads(text), {}
    names = [
        entry["model"]
        for model in config.get("models", [])
        for entry in [*model["to"], *model.get("fallback", []), model.get("mirror", {})]
        if "model" in entry
    ]
    env |= {key["key_env"]: "pk-example" for key in config.get("keys", [])}
    settings = [item for entry in config.get("plugins", []) for item in entry.get("settings", {}).items()]
    env |= {value: "pk-example" for name, value in settings if name.endswith("_env")}
    with contextlib.ExitStack() as stack:
        mocks = []
        for provider in config.get("providers", []):
            kind = KINDS[provider.get("protocol", "openai")]
            mock = stack.enter_context(kind.mock())
            mock.models = (*provider.get("models", []), *names)
            for name, value in kind.set.items():
                setattr(mock, name, value)
            if isinstance(mock, Bedrock):
                mock.region = provider["region"]
            for name in provider.get("keys_env", [provider.get("key_env")]):
                env[name] = key_of(mock)
            text = re.sub(
                rf'(id = "{provider["id"]}"\n)((?:(?!\n\n).)*?)base_url = "[^"]*"', r"\1\2", text, flags=re.DOTALL
            )
            # The path is the example's own: a wrong one is a 404 at the mock, as at the service.
            base = urlsplit(provider["base_url"]).path if "base_url" in provider else kind.base
            text = text.replace(
                f'id = "{provider["id"]}"\n', f'id = "{provider["id"]}"\nbase_url = "{mock.url}{base}"\n'
            )
            mocks.append(mock)
        yield text, env, mocks


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_works(tmp_path, path):
    with mocked(path.read_text()) as (text, env, mocks):
        pools = "[[pools]]" in text
        with serving(tmp_path, config=text, env=env, workers=1 if pools else 0) as gateway:
            client = gateway.client(api_key="pk-example")
            names = [model.id for model in client.models.list()]
            assert names
            for name in names:
                if "embedding" in name:
                    assert client.embeddings.create(model=name, input="Hello").data[0].embedding
                else:
                    answer = client.chat.completions.create(model=name, messages=user("Hello"), temperature=0)
                    assert answer.choices[0].message.content.startswith("Hello!"), (name, answer)
        assert not mocks or any(mock.seen for mock in mocks)


def test_there_are_examples():
    assert len(EXAMPLES) >= 4
