"""Answers in the shape that was asked for, from the pool's own model: formats, forced tools, every API, streamed and not."""

import json
import os
import pathlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import jsonschema
import jsonschema_rs
import openai
import pytest
from google import genai
from pydantic import BaseModel, Field

import harness
from harness import user

SCHEMAS = json.loads((pathlib.Path(__file__).parent / "schemas.json").read_text())
# Samples of each schema; 200 by hand.
SAMPLES = int(os.environ.get("PENSTOCK_SAMPLES", "10"))
# Schemas whose values may be of any length, and the counts of complete and of all answers under the others.
UNBOUNDED = ("true", "recursive list", "recursive tree")
STOPPED = []
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = user("Give me JSON with name and age: Alice is 31")


def valid(schema, value) -> None:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    checker.validate(value)
    jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(value)


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_answers_that_stop_are_valid(client, model, name):
    """Any answer that says it is complete validates, whatever the model would like to say; most are complete."""
    schema = SCHEMAS[name]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema if isinstance(schema, dict) else {}}}

    def ask(seed: int):
        return client.chat.completions.create(
            model=model,
            messages=user(name),
            response_format=form,
            temperature=1.5,
            # Reasoning is free, and so has no end at this temperature.
            reasoning_effort="none",
            max_tokens=1024,
            seed=seed,
            n=2,
        )

    with ThreadPoolExecutor(4) as threads:
        answers = [choice for answer in threads.map(ask, range((SAMPLES + 1) // 2)) for choice in answer.choices]
    stopped = [choice for choice in answers if choice.finish_reason == "stop"]
    for choice in stopped:
        valid(schema, json.loads(choice.message.content))
    if name not in UNBOUNDED:
        STOPPED.append((len(stopped), len(answers)))


def test_most_answers_are_complete():
    """A number may have any number of digits, and an address any number of letters: a few run out of room."""
    stopped, asked = (sum(counts) for counts in zip(*STOPPED, strict=True))
    print(f"{stopped} of {asked} answers under {len(STOPPED)} bounded schemas were complete")
    assert stopped >= 0.95 * asked, f"{stopped} of {asked} answers under bounded schemas were complete"


def test_an_answer_without_room_ends_as_length(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}
    answer = client.chat.completions.create(model=model, messages=QUESTION, response_format=form, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"


def test_blanks_are_left_out(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["ref"]}}
    answer = client.chat.completions.create(model=model, messages=QUESTION, response_format=form, temperature=0)
    text = answer.choices[0].message.content
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def test_any_object_is_an_object(client, model):
    ask = {"model": model, "messages": QUESTION, "response_format": {"type": "json_object"}, "max_tokens": 300, "n": 8}
    answer = client.chat.completions.create(**ask, seed=1, temperature=1.0, reasoning_effort="none")
    for choice in answer.choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_has_its_schema(client, model, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON, "strict": True}}
    ask = {"model": model, "messages": QUESTION, "response_format": form, "temperature": 0}
    if stream:
        text = "".join(
            c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask, stream=True) if c.choices
        )
    else:
        text = client.chat.completions.create(**ask).choices[0].message.content
    valid(PERSON, json.loads(text))


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def test_the_sdk_parses(client, model):
    answer = client.chat.completions.parse(model=model, messages=QUESTION, response_format=Person, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Person)
    answer = client.responses.parse(model=model, input=QUESTION[0]["content"], text_format=Person, temperature=0)
    assert isinstance(answer.output_parsed, Person)


CONSTRAINTS = [
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, r"[a-c]{3}-[0-9]{2}"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"structured_outputs": {"json": PERSON}}, r"\{.*\}"),
    ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, "ab+c"),
    ({"structured_outputs": {"grammar": 'root ::= "-"? [0-9]{1,3} tail\ntail ::= "," | ";"'}}, "-?[0-9]{1,3}[,;]"),
    ({"guided_regex": "(x|y){4}"}, "[xy]{4}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_json": PERSON}, r"\{.*\}"),
    ({"regex": "q{2}"}, "qq"),
]


@pytest.mark.parametrize(("extra", "pattern"), CONSTRAINTS, ids=[str(list(extra)) for extra, _ in CONSTRAINTS])
def test_other_constraints(client, model, extra, pattern):
    ask = {"model": model, "messages": user("a"), "temperature": 1.5, "max_tokens": 300, "extra_body": extra}
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "length" or re.fullmatch(pattern, choice.message.content, re.DOTALL), choice
    choice = client.completions.create(
        model=model, prompt="a", temperature=1.5, max_tokens=300, extra_body=extra
    ).choices[0]
    assert choice.finish_reason == "length" or re.fullmatch(pattern, choice.text, re.DOTALL), choice


REFUSED = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
        "response_format",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}, "strict": True},
            }
        },
        "uniqueItems",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://h/x"}}}},
        "$ref",
    ),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "regex"),
    ({"extra_body": {"structured_outputs": {"regex": "(?=a)b"}}}, "regex"),
    ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "choice"),
]


@pytest.mark.parametrize(("options", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_cannot_be_enforced_is_refused(client, model, options, word):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=user("a"), **options)
    assert word in refused.value.message


def calls_of(client, model, stream=False, **options):
    ask = {
        "model": model,
        "messages": user("What is the weather in Paris?"),
        "tools": TOOLS,
        "temperature": 1.0,
    } | options
    if not stream:
        choice = client.chat.completions.create(**ask).choices[0]
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
        return calls, choice.message.content, choice.finish_reason
    with client.chat.completions.stream(**ask) as events:
        choice = events.get_final_completion().choices[0]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    return calls, choice.message.content, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_tool_choice(client, model, stream, seed):
    more = {"seed": seed, "stream": stream, "max_tokens": 1000}
    calls, text, end = calls_of(client, model, tool_choice="required", **more)
    assert calls and not text and end == "tool_calls"
    for name, arguments in calls:
        valid({"get_weather": WEATHER, "get_time": TIME}[name], arguments)
    named = {"type": "function", "function": {"name": "get_time"}}
    (call,), text, _ = calls_of(client, model, tool_choice=named, **more)
    assert call[0] == "get_time" and not text
    valid(TIME, call[1])
    calls, _, _ = calls_of(client, model, tool_choice="none", **more)
    assert not calls
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]},
    }
    calls, _, _ = calls_of(client, model, tool_choice=allowed, **more)
    assert {name for name, _ in calls} == {"get_time"}
    calls, _, _ = calls_of(client, model, tool_choice="required", parallel_tool_calls=False, **more)
    assert len(calls) == 1


def test_a_tool_without_parameters_gets_an_object(client, model):
    tool = {"type": "function", "function": {"name": "f"}}
    ask = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300, "n": 8}
    answer = client.chat.completions.create(
        model=model, messages=user("a"), **ask, seed=1, temperature=1.0, reasoning_effort="none"
    )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "f" and call.function.arguments.startswith("{")
        if choice.finish_reason == "tool_calls":
            assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client, model, stream):
    form = {"format": {"type": "json_schema", "name": "x", "schema": PERSON, "strict": True}}
    ask = {"model": model, "input": QUESTION[0]["content"], "temperature": 0}
    tools = [
        {
            "type": "function",
            "name": tool["function"]["name"],
            "parameters": tool["function"]["parameters"],
            "strict": False,
        }
        for tool in TOOLS
    ]
    if stream:
        with client.responses.stream(**ask, text=form) as events:
            answer = events.get_final_response()
    else:
        answer = client.responses.create(**ask, text=form)
    valid(PERSON, json.loads(answer.output_text))
    answer = client.responses.create(**ask, tools=tools, tool_choice="required")
    assert [item.type for item in answer.output] == ["function_call"] * len(answer.output)
    answer = client.responses.create(**ask, tools=tools, tool_choice={"type": "function", "name": "get_time"})
    assert [item.name for item in answer.output] == ["get_time"]


def test_anthropic(gateway, model):
    claude = anthropic.Anthropic(base_url=gateway.url, api_key="none")
    ask = {"model": model, "max_tokens": 800, "messages": QUESTION, "extra_body": {"temperature": 0}}
    answer = claude.messages.create(**ask, output_config={"format": {"type": "json_schema", "schema": PERSON}})
    valid(PERSON, json.loads(answer.content[0].text))
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    answer = claude.messages.create(**ask, tools=tools, tool_choice={"type": "any"})
    assert answer.stop_reason == "tool_use" and {block.type for block in answer.content} == {"tool_use"}
    choice = {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}
    with claude.messages.stream(**ask, tools=tools, tool_choice=choice) as events:
        (block,) = events.get_final_message().content
    assert block.name == "get_time"
    valid(TIME, block.input)


def test_gemini(gateway, model):
    client = genai.Client(api_key="none", http_options={"base_url": gateway.url})
    text = QUESTION[0]["content"]
    config = {"response_mime_type": "application/json", "response_json_schema": PERSON, "temperature": 0}
    valid(PERSON, json.loads(client.models.generate_content(model=model, contents=text, config=config).text))
    config = {"response_mime_type": "application/json", "response_schema": Person, "temperature": 0}
    assert isinstance(client.models.generate_content(model=model, contents=text, config=config).parsed, Person)
    config = {"response_mime_type": "text/x.enum", "response_schema": {"type": "STRING", "enum": ["left", "right"]}}
    config |= {"thinking_config": {"thinking_budget": 0}}
    assert client.models.generate_content(model=model, contents=text, config=config).text in ("left", "right")
    tools = [
        {
            "function_declarations": [
                {"name": t["function"]["name"], "parameters_json_schema": t["function"]["parameters"]} for t in TOOLS
            ]
        }
    ]
    calling = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["get_time"]}}
    answer = client.models.generate_content(
        model=model, contents=text, config={"tools": tools, "tool_config": calling, "temperature": 0}
    )
    assert {call.name for call in answer.function_calls} == {"get_time"}


# What each API calls: some tool, this one, none, one of these.
CHOICES = {
    "responses": {
        "required": {"tool_choice": "required"},
        "named": {"tool_choice": {"type": "function", "name": "get_time"}},
        "none": {"tool_choice": "none"},
        "allowed": {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_time"}],
            }
        },
    },
    "anthropic": {
        "required": {"tool_choice": {"type": "any"}},
        "named": {"tool_choice": {"type": "tool", "name": "get_time"}},
        "none": {"tool_choice": {"type": "none"}},
    },
    "gemini": {
        "required": {"mode": "ANY"},
        "none": {"mode": "NONE"},
        "allowed": {"mode": "ANY", "allowed_function_names": ["get_time"]},
    },
}


def called_by_responses(gateway, model, choice, stream) -> list[tuple[str, dict]]:
    tools = [{"type": "function", "strict": False} | tool["function"] for tool in TOOLS]
    ask = {"model": model, "input": QUESTION[0]["content"], "temperature": 0, "tools": tools} | choice
    answer = gateway.client().responses.create(**ask, stream=stream)
    if stream:
        *_, end = answer
        assert end.type == "response.completed", end
        answer = end.response
    return [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]


def called_by_anthropic(gateway, model, choice, stream) -> list[tuple[str, dict]]:
    claude = anthropic.Anthropic(base_url=gateway.url, api_key="none")
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    ask = {"model": model, "max_tokens": 1000, "messages": QUESTION, "tools": tools} | choice
    if stream:
        with claude.messages.stream(**ask, extra_body={"temperature": 0}) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**ask, extra_body={"temperature": 0})
    return [(block.name, block.input) for block in answer.content if block.type == "tool_use"]


def called_by_gemini(gateway, model, choice, stream) -> list[tuple[str, dict]]:
    client = genai.Client(api_key="none", http_options={"base_url": gateway.url})
    tools = [
        {
            "function_declarations": [
                {"name": tool["function"]["name"], "parameters_json_schema": tool["function"]["parameters"]}
                for tool in TOOLS
            ]
        }
    ]
    config = {"tools": tools, "tool_config": {"function_calling_config": choice}, "temperature": 0}
    ask = {"model": model, "contents": QUESTION[0]["content"], "config": config}
    said = client.models.generate_content_stream(**ask) if stream else [client.models.generate_content(**ask)]
    return [(call.name, call.args) for piece in said for call in piece.function_calls or []]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CHOICES)
def test_every_tool_choice_of_every_other_api(gateway, model, api, stream):
    called = {"responses": called_by_responses, "anthropic": called_by_anthropic, "gemini": called_by_gemini}[api]
    for name, choice in CHOICES[api].items():
        calls = called(gateway, model, choice, stream)
        assert bool(calls) == (name != "none"), (name, calls)
        for tool, arguments in calls:
            assert name == "required" or tool == "get_time", (name, tool)
            valid({"get_weather": WEATHER, "get_time": TIME}[tool], arguments)


def test_reasoning_is_free_and_the_answer_is_not(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}
    answer = client.chat.completions.create(
        model=model,
        messages=user("What is 27 + 48?"),
        response_format=form,
        temperature=0,
        max_tokens=1000,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message = answer.choices[0].message
    assert message.reasoning and "15" in message.reasoning
    valid(PERSON, json.loads(message.content))


def test_guided_choices_take_stops_biases_and_logprobs(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}
    ask = {"model": model, "messages": QUESTION, "response_format": form, "seed": 7, "temperature": 1.0}
    plain = client.chat.completions.create(**ask, n=3)
    again = client.chat.completions.create(**ask, n=3)
    assert [c.message.content for c in plain.choices] == [c.message.content for c in again.choices]
    told = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert "".join(token.token for token in told.choices[0].logprobs.content) == told.choices[0].message.content
    stopped = client.chat.completions.create(**ask, stop=[","])
    assert stopped.choices[0].message.content.startswith('{"name":') and "," not in stopped.choices[0].message.content


def test_the_work_is_counted(gateway, client, model):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["const members"]}}
    client.chat.completions.create(model=model, messages=user("a"), response_format=form, max_tokens=200)
    lines = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"{gateway.url}/metrics").text.splitlines() if line and line[0] != "#"
    )
    count = lambda name: sum(float(value) for key, value in lines.items() if key.startswith(name))  # noqa: E731
    assert count("penstock_jumped_tokens_total") > 0 and count("penstock_grammar_masks_total") > 0
    assert count("penstock_grammars_compiled_total") > 0


def test_typed_answers_of_typescript(gateway, model):
    """zod through OpenAI's helpers, and the Vercel SDK over both of its providers."""
    folder = pathlib.Path(__file__).parent
    command = ["node", folder / "objects.mjs", f"{gateway.url}/v1", model]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["checks"] >= 31


def test_structural_tags(client, model):
    """Free text with parts that follow schemas, in both notations, streamed and not, beside tools and reasoning."""
    begin, end = "<call=weather>", "</call>"
    older = {
        "type": "structural_tag",
        "structures": [{"begin": begin, "schema": WEATHER, "end": end}],
        "triggers": ["<call="],
    }
    tag = {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": WEATHER}, "end": end}
    flow = {"at_least_one": True, "stop_after_first": True}
    newer = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<call="], "tags": [tag]}}
    newer["format"] |= flow
    asked = {"model": model, "messages": user("What is the weather in Paris?"), "temperature": 1.2, "max_tokens": 300}

    def parts(text):
        calls = re.findall(r"<call=weather>(.*?)</call>", text, re.S)
        assert len(calls) == text.count("<call="), text
        return [json.loads(call) for call in calls]

    for seed in range(SAMPLES):
        answer = client.chat.completions.create(**asked, seed=seed, extra_body={"response_format": newer})
        choice = answer.choices[0]
        assert choice.finish_reason == "stop", choice
        [call] = parts(choice.message.content)
        valid(WEATHER, call)
        answer = client.chat.completions.create(
            **asked, seed=seed, extra_body={"structured_outputs": {"structural_tag": older}}
        )
        if answer.choices[0].finish_reason == "stop":
            for call in parts(answer.choices[0].message.content):
                valid(WEATHER, call)
    # A trigger in the prompt's continuation is followed by a tag.
    stream = client.chat.completions.create(
        **asked, stream=True, tools=TOOLS, extra_body={"response_format": newer, "thinking_token_budget": 3}
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    valid(WEATHER, parts(text)[0])
    bad = {"type": "structural_tag", "format": {"type": "any_tokens"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked, extra_body={"response_format": bad})
    assert "any_tokens" in str(refused.value) and "format.type" in str(refused.value)


def test_a_pool_can_hold_every_call_to_its_tool(tmp_path):
    """Under auto and without strict: the model may answer in text, but a call that has begun follows its schema."""
    config = '[[pools]]\nid = "held"\nhold_tool_calls = true\n'
    question = user("What is the weather in Paris?")
    with harness.serving(tmp_path, workers=0, config=config) as gateway:
        client = gateway.client()
        called = 0
        for seed in range(2 * SAMPLES):
            answer = client.chat.completions.create(
                model="held", messages=question, tools=TOOLS, temperature=1.5, seed=seed, max_tokens=200
            )
            if answer.choices[0].finish_reason != "tool_calls":
                continue
            for call in answer.choices[0].message.tool_calls:
                schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call.function.name)
                valid(schema, json.loads(call.function.arguments))
                called += 1
        assert called > 0, "the model calls"
