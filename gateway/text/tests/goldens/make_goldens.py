#!/usr/bin/env python3
"""Writes what Hugging Face transformers renders for each template and each case, for tests/all/templates.rs to compare.

    python3 -m venv .venv && .venv/bin/pip install transformers==5.23.0 jinja2==3.1.6
    .venv/bin/python make_goldens.py                              # templates/*.jinja and the demo model, beside this file
    .venv/bin/python make_goldens.py --templates DIR --out DIR    # any other templates, e.g. a copy of llama.cpp's

The second form is for checking more templates than the project may carry: PENSTOCK_TEMPLATE_GOLDENS=DIR cargo test -p penstock-text --test all templates
"""

import argparse
import copy
import datetime
import json
import pathlib
import re

from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).resolve().parent
DEMO = HERE.parents[3] / "models" / "penstock-demo"
NOW = 1_700_000_000
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city: \"now\" & <later>, 5° 'C'",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city, e.g. Zürich"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": None},
                "days": {"type": "integer", "minimum": 1, "maximum": 14.5},
            },
            "required": ["city"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def thought(text):
    return {"reasoning_content": text, "reasoning": text}  # the gateway gives templates both names


def call(i, name, **arguments):
    return {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(i, name, text):
    return {"role": "tool", "tool_call_id": f"call0000{i}", "name": name, "content": text}


NUMBERS = {
    "type": "function",
    "function": {
        "name": "numbers",
        "description": "",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "number", "default": 1e-05, "multipleOf": 0.1, "maximum": 1e16, "minimum": -0.0},
                "n": {"type": ["integer", "null"], "maximum": 123456789012345678901234567890, "enum": [1, 1.0, None]},
                "items": {"type": "array", "items": {"$ref": "#/$defs/ß"}, "default": []},
                "o": {"anyOf": [{"type": "object", "properties": {}}, {"type": "string", "pattern": "^\\d+\n$"}]},
            },
            "additionalProperties": False,
            "$defs": {"ß": {"type": "string", "title": "名前 </tool> \u2028"}},
        },
    },
}
ONE = call(1, "get_weather", city="Zürich", unit="celsius")
TWO = call(2, "add", a=1, b=2.5)
TURNS = [user("Hi"), assistant("Hello! How can I help?"), user("  Tell me\nabout 漢字 & <b>&amp;</b> 👋🏽 \n")]
RESULT = [
    user("Weather in Zürich?"),
    assistant(None, tool_calls=[ONE]),
    result(1, "get_weather", '{"temp": 5, "sky": "grau"}'),
]
CASES = {
    "user": dict(messages=[user("Hello")]),
    "system_user": dict(messages=[system("You are terse."), user("Hello")]),
    "no_generation_prompt": dict(messages=[user("Hello"), assistant("Hi.")], add_generation_prompt=False),
    "turns": dict(messages=TURNS),
    "system_turns": dict(messages=[system("Be kind."), *TURNS]),
    "empty_system": dict(messages=[system(""), user("Hello")]),
    "blanks": dict(messages=[user(" \n "), assistant("\n\n x \n"), user("y\n")]),
    "tools": dict(messages=[user("Weather in Zürich?")], tools=[WEATHER]),
    "system_tools": dict(messages=[system("Use tools."), user("1 + 2.5?")], tools=[WEATHER, ADD]),
    "tool_result": dict(messages=RESULT, tools=[WEATHER]),
    "tool_result_answered": dict(messages=[*RESULT, assistant("5 degrees, grey."), user("Thanks")], tools=[WEATHER]),
    "parallel": dict(
        messages=[
            user("Both"),
            assistant("Let me see.", tool_calls=[ONE, TWO]),
            result(1, "get_weather", "5"),
            result(2, "add", "3.5"),
        ],
        tools=[WEATHER, ADD],
    ),
    "empty_content_call": dict(
        messages=[user("Weather?"), assistant("", tool_calls=[ONE]), result(1, "get_weather", "5")], tools=[WEATHER]
    ),
    "call_without_arguments": dict(
        messages=[user("Go"), assistant(None, tool_calls=[call(1, "go")]), result(1, "go", "gone")], tools=[ADD]
    ),
    "continue": dict(
        messages=[user("Count"), assistant("1, 2, ")], add_generation_prompt=False, continue_final_message=True
    ),
    "continue_trimmed": dict(
        messages=[user("Count"), assistant("1, 2,")], add_generation_prompt=False, continue_final_message=True
    ),
    "thinking": dict(messages=[user("Think")], kwargs={"enable_thinking": True}),
    "not_thinking": dict(messages=[user("Think not")], kwargs={"enable_thinking": False}),
    "effort": dict(messages=[user("Think")], kwargs={"reasoning_effort": "high"}),
    "reasoning_history": dict(messages=[user("1 + 1"), assistant("2", **thought("One and one.\n")), user("+ 1")]),
    "reasoning_call": dict(
        messages=[
            user("Weather?"),
            assistant(None, tool_calls=[ONE], **thought("I must look.")),
            result(1, "get_weather", "5"),
        ],
        tools=[WEATHER],
    ),
    "think_in_content": dict(messages=[user("1 + 1"), assistant("<think>\nOne.\n</think>\n\n2"), user("+ 1")]),
    "numbers": dict(
        messages=[
            user("Go"),
            assistant(
                None,
                tool_calls=[
                    call(
                        1,
                        "numbers",
                        x=[1e-07, 1e22, 1.5, 100.0, -0.0, 0.1],
                        n=123456789012345678901234567890,
                        o={"é": {"it's": ['a"b', None, True, {}]}, "": "\\ \t \U0001f600"},
                        items=[],
                    )
                ],
            ),
            result(1, "numbers", "1e-07"),
        ],
        tools=[NUMBERS],
    ),
    "long": dict(
        messages=[
            system("Calls and thoughts."),
            user("One"),
            assistant("", **thought("Look."), tool_calls=[ONE]),
            result(1, "get_weather", "5"),
            assistant("It is 5.", **thought("Told.")),
            user("Two"),
            assistant(None, tool_calls=[TWO]),
            result(2, "add", ""),
            assistant("3.5"),
            user("Three\r\n\u00a0\u3000"),
        ],
        tools=[WEATHER, ADD, NUMBERS],
    ),
    "documents": dict(
        messages=[user("Read")],
        kwargs={"documents": [{"title": "T", "text": "One\nTwo"}, {"title": "Ü", "text": "Drei"}]},
    ),
    "thinking_words": dict(
        messages=[user("Think")], kwargs={"thinking": True, "reasoning_effort": "low", "model_identity": "You are X."}
    ),
    "not_thinking_calls": dict(messages=RESULT, tools=[WEATHER], kwargs={"enable_thinking": False, "thinking": False}),
    "continue_call": dict(
        messages=[*RESULT, assistant("It is ")],
        tools=[WEATHER],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "only_system": dict(messages=[system("Alone")]),
    "empty_user": dict(messages=[user("")]),
    "two_users": dict(messages=[user("a"), user("b")]),
}


def render(template, case, special):
    """The text, or None and what went wrong."""
    case = copy.deepcopy(case)
    if not re.search(r"(['\"]content['\"]\]|\.content) is (not )?none", template):
        # Most templates fail on null or print "None"; the gateway gives an empty text to those that do not ask for it.
        for message in case["messages"]:
            message["content"] = message["content"] or ""
    kwargs = {**special, **case.get("kwargs", {})}
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=[case["messages"]],
            tools=case.get("tools"),
            chat_template=template,
            add_generation_prompt=case.get("add_generation_prompt", True),
            continue_final_message=case.get("continue_final_message", False),
            **kwargs,
        )
        return texts[0], None
    except Exception as error:  # whatever a template does
        return None, f"{type(error).__name__}: {error}"[:200]


def golden(template, special, tokenizer=None):
    cases = {}
    for name, case in CASES.items():
        text, error = render(template, case, special)
        entry = {"text": text} if error is None else {"error": error}
        if tokenizer and text is not None:
            entry["ids"] = tokenizer(text, add_special_tokens=False)["input_ids"]
        cases[name] = entry
    return {"special": special, "cases": cases}


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def fixed_clock():
    """Lets `strftime_now` see the same time in every run."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.fromtimestamp(NOW, datetime.UTC).replace(tzinfo=tz)

    chat_template_utils.datetime = Clock


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", type=pathlib.Path, default=HERE / "templates")
    parser.add_argument("--out", type=pathlib.Path, default=HERE)
    a = parser.parse_args()

    fixed_clock()
    a.out.mkdir(parents=True, exist_ok=True)
    write(a.out / "cases.json", CASES)
    for path in sorted(a.templates.glob("*.jinja")):
        write(a.out / f"{path.stem}.json", {"template": path.name, **golden(path.read_text(), SPECIAL)})
    if a.out == HERE:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO)
        special = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        write(a.out / "penstock-demo.json", {"template": None, **golden(tokenizer.chat_template, special, tokenizer)})


if __name__ == "__main__":
    main()
