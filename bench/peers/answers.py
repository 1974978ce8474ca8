#!/usr/bin/env python3
"""Answers of two servers with one checkpoint, beside each other: which requests do they answer differently?

Usage: answers.py OURS_URL OTHER_URL [MODEL=penstock-demo]

Each request is asked of both, greedy (temperature 0). A request differs if the status, the text, the reasoning, the calls, the
reason of the end or a count of tokens differs. JSON is also compared by its value: "blanks" are texts that differ in blanks alone.
The servers that docs/reference/structured-output.md names were started as its section "Beside vLLM" says.
"""

from __future__ import annotations

import json
import pathlib
import sys

import httpx

OURS, OTHER = (url.rstrip("/") for url in sys.argv[1:3])
MODEL = sys.argv[3] if len(sys.argv) > 3 else "penstock-demo"
SCHEMAS = json.loads((pathlib.Path(__file__).parents[2] / "tests/e2e/schemas.json").read_text())

ALICE = "Give me JSON with name and age: Alice is 31"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ZONE = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time", "description": "Time in a zone", "parameters": ZONE}},
]
ONE_TOOL = TOOLS[:1]
PARIS = "What is the weather in Paris?"
CALLED = [
    {"role": "user", "content": PARIS},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 12, "condition": "rainy"}'},
]


def schema(value, strict=True) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, "strict": strict}}


def tag(**more) -> dict:
    return {"type": "structural_tag", **more}


FUNCTION_TAG = {"begin": "<function=f>", "schema": PERSON, "end": "</function>"}


def requests():
    """Name of a request, and its body: a string as the prompt, or messages, and further fields."""
    plain = {
        "greeting": ("Hello", {}),
        "count": ("Count from 1 to 30.", {}),
        "cut by max_tokens": ("Count from 1 to 30.", {"max_tokens": 7}),
        "stop string": ("Count from 1 to 30.", {"stop": ["7"]}),
        "stop string, included": ("Count from 1 to 30.", {"stop": ["7"], "include_stop_str_in_output": True}),
        "min_tokens": ("Hello", {"min_tokens": 20, "max_tokens": 24}),
        "ignore_eos": ("Hello", {"ignore_eos": True, "max_tokens": 24}),
        "two choices": ("Hello", {"n": 2}),
        "log-probabilities": ("Hello", {"logprobs": True, "top_logprobs": 2}),
        "bias": ("Hello", {"logit_bias": {"50": -100}}),
        "repetition penalty": ("Count from 1 to 30.", {"repetition_penalty": 1.3, "max_tokens": 40}),
        "presence and frequency penalty": (
            "Count from 1 to 30.",
            {"presence_penalty": 1, "frequency_penalty": 1, "max_tokens": 40},
        ),
        "reasoning": ("What is 27 + 48?", {"chat_template_kwargs": {"enable_thinking": True}}),
        "reasoning by the prompt": ("What is 27 + 48? /think", {}),
        "no reasoning": ("What is 27 + 48?", {"chat_template_kwargs": {"enable_thinking": False}}),
    }
    formats = {
        "json_object": (ALICE, {"response_format": {"type": "json_object"}}),
        "json_schema": (ALICE, {"response_format": schema(PERSON)}),
        "json_schema, not strict": (ALICE, {"response_format": schema(PERSON, False)}),
        "structured_outputs.json": (ALICE, {"structured_outputs": {"json": PERSON}}),
        "structured_outputs.regex": ("Hello", {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}),
        "structured_outputs.choice": ("Hello", {"structured_outputs": {"choice": ["left", "right"]}}),
        "structured_outputs.grammar": (
            "Hello",
            {"structured_outputs": {"grammar": 'root ::= "a" "b"+ "c"'}, "max_tokens": 30},
        ),
        "structural tag, old": (
            "Hello",
            {"response_format": tag(structures=[FUNCTION_TAG], triggers=["<function="]), "max_tokens": 40},
        ),
        "structural tag, new": (
            ALICE,
            {"response_format": tag(format={"type": "json_schema", "json_schema": PERSON}), "max_tokens": 60},
        ),
        "schema behind reasoning": (
            "What is 27 + 48?",
            {
                "chat_template_kwargs": {"enable_thinking": True},
                "response_format": schema(
                    {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
                ),
                "max_tokens": 200,
            },
        ),
    }
    tools = {
        "tools, auto": (PARIS, {"tools": TOOLS}),
        "one tool, auto": (PARIS, {"tools": ONE_TOOL}),
        "tools, not needed": ("Hello", {"tools": TOOLS}),
        "tools, required": (PARIS, {"tools": TOOLS, "tool_choice": "required"}),
        "tools, required, one call": (PARIS, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
        "tools, named": (
            PARIS,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        "tools, the other named": (
            PARIS,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
        ),
        "tools, none": (PARIS, {"tools": TOOLS, "tool_choice": "none"}),
        "after a call": (CALLED, {"tools": ONE_TOOL}),
        "no tools, an empty list": ("Hello", {"tools": []}),
    }
    refused = {
        "schema of no type": ("Hello", {"response_format": schema({"type": "strin"})}),
        "schema that fetches": ("Hello", {"response_format": schema({"$ref": "http://127.0.0.1:1/x"})}),
        "regex that does not close": ("Hello", {"structured_outputs": {"regex": "(a"}}),
        "no choices": ("Hello", {"structured_outputs": {"choice": []}}),
        "grammar without a rule": ("Hello", {"structured_outputs": {"grammar": "root ::= x"}}),
        "two forms": ("Hello", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        "a tool that is not there": (
            "Hello",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        "required without tools": ("Hello", {"tool_choice": "required"}),
        "unknown format": ("Hello", {"response_format": {"type": "yaml"}}),
        "temperature out of range": ("Hello", {"temperature": -1}),
        "top_p out of range": ("Hello", {"top_p": 0}),
        "max_tokens of 0": ("Hello", {"max_tokens": 0}),
        "more log-probabilities than there are": ("Hello", {"logprobs": True, "top_logprobs": 30}),
    }
    for name, value in SCHEMAS.items():
        formats[f"schema: {name}"] = (ALICE, {"response_format": schema(value), "max_tokens": 300})
    return plain | formats | tools | refused


def ask(url: str, prompt, more: dict) -> dict:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 400} | more
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    said = {"status": answer.status_code}
    if answer.status_code != 200:
        error = answer.json()
        return said | {
            "error": str(error.get("error", error).get("message", error) if isinstance(error, dict) else error)[:160]
        }
    whole = answer.json()
    for index, choice in enumerate(whole["choices"]):
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        said[f"text{index}"] = message.get("content") or ""
        said[f"reasoning{index}"] = (message.get("reasoning") or message.get("reasoning_content") or "").strip()
        said[f"calls{index}"] = calls
        said[f"finish{index}"] = choice["finish_reason"]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        said[f"tokens{index}"] = [(token["token"], round(token["logprob"], 2)) for token in tokens]
    said["prompt_tokens"], said["completion_tokens"] = (
        whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )
    return said


def without_blanks(value):
    """JSON as its value; what is no JSON as it is."""
    if isinstance(value, str):
        try:
            return json.dumps(json.loads(value))
        except ValueError:
            return value.strip()
    if isinstance(value, (list, tuple)):
        return [without_blanks(item) for item in value]
    return value


def main() -> None:
    counts = {"equal": 0, "blanks": 0, "differs": 0}
    for name, (prompt, more) in requests().items():
        ours, other = ask(OURS, prompt, more), ask(OTHER, prompt, more)
        fields = [field for field in ours | other if ours.get(field) != other.get(field) and field != "error"]
        # Blanks cost tokens of their own.
        kind = "equal" if not fields else "differs"
        loose = [
            f
            for f in fields
            if f != "completion_tokens" and without_blanks(ours.get(f)) != without_blanks(other.get(f))
        ]
        if fields and not loose:
            kind = "blanks"
        counts[kind] += 1
        print(f"{kind:8} {name}")
        for field in loose or (["error"] if "error" in ours | other else []):
            print(f"    {field}: {str(ours.get(field))[:150]!r}  |  {str(other.get(field))[:150]!r}")
    print(json.dumps(counts))


main()
