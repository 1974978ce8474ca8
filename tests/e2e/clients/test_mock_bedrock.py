"""The mock of Bedrock is believed because boto3 works on it: it signs, and it reads the event stream."""

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EventStreamError

from conversations import RESULT
from drivers import SCHEMA
from providers import Bedrock
from providers.brain import GREETING

TOOLS = {"tools": [{"toolSpec": {"name": "get_weather", "description": "Weather", "inputSchema": {"json": SCHEMA}}}]}


@pytest.fixture(scope="module")
def mock():
    with Bedrock() as running:
        yield running


@pytest.fixture
def client(mock):
    mock.reset()
    return boto3.client(
        "bedrock-runtime",
        endpoint_url=mock.url,
        region_name=mock.region,
        aws_access_key_id=mock.access_key,
        aws_secret_access_key=mock.key,
        config=Config(retries={"max_attempts": 0}),
    )


def user(text):
    return [{"role": "user", "content": [{"text": text}]}]


@pytest.mark.parametrize("model", ["mock-model", "anthropic.mock-v1:0"])
def test_whole(client, model):
    answer = client.converse(modelId=model, messages=user("Hello"))
    assert answer["output"]["message"]["content"] == [{"text": GREETING}] and answer["stopReason"] == "end_turn"


def test_stream(client, mock):
    for cut in ("event", "byte", "odd", "whole"):
        with mock.behaving(cut=cut):
            events = list(client.converse_stream(modelId="mock-model", messages=user("Hello"))["stream"])
        text = "".join(event["contentBlockDelta"]["delta"]["text"] for event in events if "contentBlockDelta" in event)
        assert text == GREETING and list(events[-1]) == ["metadata"]


def test_tools(client):
    messages = user("What is the weather in Paris?")
    first = client.converse(modelId="mock-model", messages=messages, toolConfig=TOOLS)["output"]["message"]
    use = first["content"][0]["toolUse"]
    assert use["input"] == {"city": "Paris"}
    result = {"toolResult": {"toolUseId": use["toolUseId"], "content": [{"text": RESULT}]}}
    messages += [first, {"role": "user", "content": [result]}]
    second = client.converse(modelId="mock-model", messages=messages, toolConfig=TOOLS)
    assert RESULT in second["output"]["message"]["content"][0]["text"]


def test_faults(client, mock):
    mock.fail(status=429)
    with pytest.raises(ClientError) as limited:
        client.converse(modelId="mock-model", messages=user("Hello"))
    assert limited.value.response["Error"]["Code"] == "ThrottlingException"
    mock.fail(error_at=2)
    with pytest.raises(EventStreamError):
        list(client.converse_stream(modelId="mock-model", messages=user("Hello"))["stream"])


def test_a_wrong_secret_is_refused(mock):
    client = boto3.client(
        "bedrock-runtime",
        endpoint_url=mock.url,
        region_name=mock.region,
        aws_access_key_id=mock.access_key,
        aws_secret_access_key="wrong",
    )
    with pytest.raises(ClientError) as refused:
        client.converse(modelId="mock-model", messages=user("Hello"))
    assert "signature" in str(refused.value)
