"""instructor: typed answers by a forced tool call or a schema, from providers that can force one."""

import instructor
import openai
import pytest
from pydantic import BaseModel


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
