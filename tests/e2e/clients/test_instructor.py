"""instructor: typed answers by a forced tool call or a schema, from the pool and from providers that can force one."""

from typing import Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field


class Place(BaseModel):
    city: str


class Report(BaseModel):
    city: str
    temperature: int


@pytest.fixture(params=["openai", "anthropic", "gemini", "bedrock"])
def scripted(request, everything):
    return everything.up(request.param)


def ask(up, mode, kind, text):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{up.url}/v1", api_key=up.key, max_retries=0), mode=mode)
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=up.model, response_model=kind, messages=messages, max_retries=0)


def test_by_a_tool(scripted):
    assert ask(scripted, instructor.Mode.TOOLS, Place, "Hello").city == "Paris"


def test_by_a_schema(scripted):
    if "form" in scripted.refuses:
        with pytest.raises(Exception, match="response_format"):
            ask(scripted, instructor.Mode.JSON_SCHEMA, Report, "Answer in JSON")
        return
    assert ask(scripted, instructor.Mode.JSON_SCHEMA, Report, "Answer in JSON").temperature == 12


class Weather(BaseModel):
    """What has no bound may not end at the demo model."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    temperature: int = Field(ge=-50, le=60)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_the_pool_answers_in_any_mode(everything, mode):
    assert ask(everything.up("pool"), mode, Weather, "The weather in Paris: 12 degrees").city in ("Paris", "Rome")


def test_a_list_is_streamed(everything):
    up = everything.up("pool")
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{up.url}/v1", api_key=up.key, max_retries=0), mode=instructor.Mode.JSON_SCHEMA
    )
    messages = [{"role": "user", "content": "Give me JSON with city and temperature: Paris is 12"}]
    parts = list(
        client.chat.completions.create_partial(model=up.model, response_model=Weather, messages=messages, max_retries=0)
    )
    assert isinstance(parts[-1].temperature, int)
