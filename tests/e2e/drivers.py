"""Official SDKs behind one face: the same conversation through each, whole or streamed, so that cells of a matrix can be compared.

A driver keeps the conversation in its SDK's own types, as an application does: what the SDK returned goes back unchanged.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import anthropic
import httpx
import httpx2
import ollama
import openai
from google import genai
from google.genai import errors as genai_errors
from google.genai import types

TIMEOUT_SECONDS = 60.0
# What a torn connection is; the SDKs have their own generation of the HTTP client.
BROKEN = (httpx.TransportError, httpx2.TransportError)
# A red PNG of one pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city"}},
    "required": ["city"],
}
WEATHER = ("get_weather", "Get the weather in a city", SCHEMA)


@dataclass
class Said:
    """What an answer said, without its dialect."""

    text: str = ""
    thinking: str = ""
    # Name and arguments.
    calls: list[tuple[str, dict]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    # In the words of the dialect.
    finish: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    # OpenAI: "" beside calls, where null belongs.
    blank: bool = False
    # Pieces in which the text came.
    pieces: int = 0


@dataclass
class Wish:
    """What is asked for besides the conversation; each driver says it in its dialect."""

    system: str | None = None
    tools: bool = False
    # auto, none, required, or "name:…"
    choice: str | None = None
    parallel: bool | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    thinking: bool = False
    json_schema: dict | None = None
    temperature: float | None = 0.0


class Driver:
    """What all have."""

    # Called with each piece of a streamed text: tests wait for the first one.
    heard: Callable[[], object] = staticmethod(lambda: None)


class OpenAiChat(Driver):
    """openai: chat.completions."""

    name = "chat"
    finishes = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls"}

    def __init__(self, url: str, key: str, model: str, **options):
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS, **options
        )
        self.model = model
        self.messages: list = []

    def say(self, text: str, image: bool = False) -> None:
        content = text
        if image:
            picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
            content = [{"type": "text", "text": text}, picture]
        self.messages.append({"role": "user", "content": content})

    def give(self, said: Said, results: list[str]) -> None:
        for id, result in zip(said.ids, results, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": id, "content": result})

    def options(self, wish: Wish) -> dict:
        options: dict = {"model": self.model, "messages": self.messages}
        if wish.system:
            options["messages"] = [{"role": "system", "content": wish.system}, *self.messages]
        if wish.tools:
            name, description, schema = WEATHER
            function = {"name": name, "description": description, "parameters": schema}
            options["tools"] = [{"type": "function", "function": function}]
        if wish.choice and wish.choice.startswith("name:"):
            options["tool_choice"] = {"type": "function", "function": {"name": wish.choice[5:]}}
        elif wish.choice:
            options["tool_choice"] = wish.choice
        if wish.json_schema:
            schema = {"name": "answer", "schema": wish.json_schema}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        if wish.thinking:
            options["reasoning_effort"] = "medium"
        given = {"temperature": wish.temperature, "max_tokens": wish.max_tokens, "stop": wish.stop}
        given["parallel_tool_calls"] = wish.parallel
        return options | {name: value for name, value in given.items() if value is not None}

    def ask(self, wish: Wish, stream: bool) -> Said:
        options = self.options(wish)
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
            return self._streamed(self.client.chat.completions.create(**options))
        answer = self.client.chat.completions.create(**options)
        (choice,) = answer.choices
        message = choice.message
        self.messages.append(message)
        said = Said(message.content or "", finish=choice.finish_reason, pieces=1)
        said.thinking = getattr(message, "reasoning_content", None) or ""
        said.blank = bool(message.tool_calls) and message.content == ""
        for call in message.tool_calls or []:
            said.ids.append(call.id)
            said.calls.append((call.function.name, json.loads(call.function.arguments)))
        said.input_tokens, said.output_tokens = answer.usage.prompt_tokens, answer.usage.completion_tokens
        assert answer.usage.total_tokens == said.input_tokens + said.output_tokens
        return said

    def _streamed(self, chunks) -> Said:
        said, calls, ends, usages = Said(), [], [], []
        heads = set()
        for chunk in chunks:
            heads.add((chunk.id, chunk.created, chunk.model))
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                said.text += choice.delta.content or ""
                if choice.delta.content:
                    said.pieces += 1
                    self.heard()
                said.thinking += getattr(choice.delta, "reasoning_content", None) or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
                for delta in choice.delta.tool_calls or []:
                    if delta.index == len(calls):
                        assert delta.id and delta.function.name and delta.type == "function", delta
                        calls.append([delta.id, delta.function.name, ""])
                    else:
                        assert delta.id is None and not delta.function.name, delta
                    calls[delta.index][2] += delta.function.arguments or ""
        assert len(heads) == 1 and len(ends) == 1 and len(usages) == 1, (heads, ends, usages)
        (said.finish,) = ends
        said.ids = [id for id, _, _ in calls]
        said.calls = [(name, json.loads(arguments)) for _, name, arguments in calls]
        said.input_tokens, said.output_tokens = usages[0].prompt_tokens, usages[0].completion_tokens
        message = {"role": "assistant", "content": said.text or None}
        if calls:
            functions = [(id, {"name": name, "arguments": arguments}) for id, name, arguments in calls]
            message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in functions]
        self.messages.append(message)
        return said

    # Typed exceptions by kind of fault; status of an error event within a stream is none.
    def fault(self, kind: str):
        return {
            "bad_request": openai.BadRequestError,
            "unauthorized": openai.AuthenticationError,
            "not_found": openai.NotFoundError,
            "rate_limit": openai.RateLimitError,
            "overloaded": openai.InternalServerError,
            "server": openai.InternalServerError,
            "stream": (openai.APIError, *BROKEN),
        }[kind]


class OpenAiResponses(Driver):
    """openai: responses, without server state (the conversation is sent each time)."""

    name = "responses"
    finishes = {"stop": "completed", "stop_sequence": "completed", "length": "incomplete", "tool_calls": "completed"}
    fault = OpenAiChat.fault

    def __init__(self, url: str, key: str, model: str, **options):
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS, **options
        )
        self.model = model
        self.items: list = []

    def say(self, text: str, image: bool = False) -> None:
        content = text
        if image:
            picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}
            content = [{"type": "input_text", "text": text}, picture]
        self.items.append({"role": "user", "content": content})

    def give(self, said: Said, results: list[str]) -> None:
        for id, result in zip(said.ids, results, strict=True):
            self.items.append({"type": "function_call_output", "call_id": id, "output": result})

    def options(self, wish: Wish) -> dict:
        assert not wish.stop, "Responses has no stop strings"
        options: dict = {"model": self.model, "input": self.items, "store": False}
        if wish.tools:
            name, description, schema = WEATHER
            tool = {"type": "function", "name": name, "description": description, "parameters": schema}
            options["tools"] = [tool | {"strict": False}]
        if wish.choice and wish.choice.startswith("name:"):
            options["tool_choice"] = {"type": "function", "name": wish.choice[5:]}
        elif wish.choice:
            options["tool_choice"] = wish.choice
        if wish.json_schema:
            form = {"type": "json_schema", "name": "answer", "schema": wish.json_schema, "strict": False}
            options["text"] = {"format": form}
        if wish.thinking:
            options["reasoning"] = {"effort": "medium", "summary": "auto"}
        given = {"temperature": wish.temperature, "max_output_tokens": wish.max_tokens, "instructions": wish.system}
        given["parallel_tool_calls"] = wish.parallel
        return options | {name: value for name, value in given.items() if value is not None}

    def ask(self, wish: Wish, stream: bool) -> Said:
        options = self.options(wish)
        said = Said(pieces=1)
        if stream:
            said.pieces, texts, kinds = 0, "", []
            for number, event in enumerate(self.client.responses.create(**options, stream=True)):
                assert event.sequence_number == number, event
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    texts += event.delta
                    said.pieces += 1
                    self.heard()
                if event.type in ("response.completed", "response.incomplete"):
                    response = event.response
            assert kinds[:2] == ["response.created", "response.in_progress"], kinds
            assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
            assert texts == response.output_text
        else:
            response = self.client.responses.create(**options)
        self.items += response.output
        said.text, said.finish = response.output_text, response.status
        for item in response.output:
            if item.type == "function_call":
                said.ids.append(item.call_id)
                said.calls.append((item.name, json.loads(item.arguments)))
            elif item.type == "reasoning":
                parts = [*item.summary, *(item.content or [])]
                said.thinking += "".join(part.text for part in parts)
        said.input_tokens, said.output_tokens = response.usage.input_tokens, response.usage.output_tokens
        return said


class Anthropic(Driver):
    """anthropic: messages."""

    name = "messages"
    finishes = {
        "stop": "end_turn",
        "stop_sequence": "stop_sequence",
        "length": "max_tokens",
        "tool_calls": "tool_use",
    }

    def __init__(self, url: str, key: str, model: str, **options):
        self.client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS, **options)
        self.model = model
        self.messages: list = []

    def say(self, text: str, image: bool = False) -> None:
        content = text
        if image:
            source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
            content = [{"type": "image", "source": source}, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})

    def give(self, said: Said, results: list[str]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": result}
            for id, result in zip(said.ids, results, strict=True)
        ]
        self.messages.append({"role": "user", "content": blocks})

    def options(self, wish: Wish) -> dict:
        limit = wish.max_tokens or (2000 if wish.thinking else 400)
        options: dict = {"model": self.model, "messages": self.messages, "max_tokens": limit}
        if wish.tools:
            name, description, schema = WEATHER
            options["tools"] = [{"name": name, "description": description, "input_schema": schema}]
        choice = {"auto": {"type": "auto"}, "required": {"type": "any"}, "none": {"type": "none"}}.get(wish.choice)
        if wish.choice and wish.choice.startswith("name:"):
            choice = {"type": "tool", "name": wish.choice[5:]}
        if wish.parallel is False:
            choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
        if wish.json_schema:
            options["output_config"] = {"format": {"type": "json_schema", "schema": wish.json_schema}}
        if wish.thinking:
            options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        if wish.temperature is not None:
            # The 2.x SDK has no argument for it any more; the API still takes it.
            options["extra_body"] = {"temperature": wish.temperature}
        given = {"system": wish.system, "stop_sequences": wish.stop, "tool_choice": choice}
        return options | {name: value for name, value in given.items() if value is not None}

    def ask(self, wish: Wish, stream: bool) -> Said:
        options = self.options(wish)
        said = Said(pieces=1)
        if stream:
            with self.client.messages.stream(**options) as events:
                kinds = []
                for event in events:
                    kinds.append(event.type)
                    if event.type == "text":
                        self.heard()
                message = events.get_final_message()
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
            said.pieces = kinds.count("text")
        else:
            message = self.client.messages.create(**options)
        self.messages.append({"role": "assistant", "content": message.content})
        said.finish = message.stop_reason
        for block in message.content:
            if block.type == "text":
                said.text += block.text
            elif block.type == "thinking":
                said.thinking += block.thinking
            elif block.type == "tool_use":
                said.ids.append(block.id)
                said.calls.append((block.name, block.input))
        usage = message.usage
        # Anthropic counts what a cache held apart.
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        said.input_tokens, said.output_tokens = usage.input_tokens + cached, usage.output_tokens
        return said

    def fault(self, kind: str):
        return {
            "bad_request": anthropic.BadRequestError,
            "unauthorized": anthropic.AuthenticationError,
            "not_found": anthropic.NotFoundError,
            "rate_limit": anthropic.RateLimitError,
            "overloaded": anthropic.InternalServerError,
            "server": anthropic.InternalServerError,
            "stream": (anthropic.APIError, *BROKEN),
        }[kind]


class Gemini(Driver):
    """google-genai: models.generate_content."""

    name = "generate"
    finishes = {"stop": "STOP", "stop_sequence": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}

    def __init__(self, url: str, key: str, model: str, **_):
        options = types.HttpOptions(base_url=url, timeout=int(TIMEOUT_SECONDS * 1000))
        self.client = genai.Client(api_key=key, http_options=options, vertexai=False)
        self.model = model
        self.contents: list = []

    def say(self, text: str, image: bool = False) -> None:
        parts = [types.Part(text=text)]
        if image:
            parts.append(types.Part.from_bytes(data=base64.b64decode(PIXEL), mime_type="image/png"))
        self.contents.append(types.Content(role="user", parts=parts))

    def give(self, said: Said, results: list[str]) -> None:
        parts = []
        for id, (name, _), result in zip(said.ids, said.calls, results, strict=True):
            answer = types.FunctionResponse(id=id, name=name, response={"result": result})
            parts.append(types.Part(function_response=answer))
        self.contents.append(types.Content(role="user", parts=parts))

    def options(self, wish: Wish) -> types.GenerateContentConfig:
        config = types.GenerateContentConfig(
            system_instruction=wish.system,
            temperature=wish.temperature,
            max_output_tokens=wish.max_tokens,
            stop_sequences=wish.stop,
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )
        if wish.tools:
            name, description, schema = WEATHER
            function = types.FunctionDeclaration(name=name, description=description, parameters=schema)
            config.tools = [types.Tool(function_declarations=[function])]
        if wish.choice:
            mode = {"auto": "AUTO", "none": "NONE"}.get(wish.choice, "ANY")
            names = [wish.choice[5:]] if wish.choice.startswith("name:") else None
            calling = types.FunctionCallingConfig(mode=mode, allowed_function_names=names)
            config.tool_config = types.ToolConfig(function_calling_config=calling)
        if wish.json_schema:
            config.response_mime_type, config.response_json_schema = "application/json", wish.json_schema
        if wish.thinking:
            config.thinking_config = types.ThinkingConfig(include_thoughts=True, thinking_budget=1024)
        return config

    def ask(self, wish: Wish, stream: bool) -> Said:
        asked = {"model": self.model, "contents": self.contents, "config": self.options(wish)}
        if stream:
            answers = []
            for answer in self.client.models.generate_content_stream(**asked):
                answers.append(answer)
                if answer.text:
                    self.heard()
        else:
            answers = [self.client.models.generate_content(**asked)]
        said, parts, finish = Said(), [], []
        for answer in answers:
            for candidate in answer.candidates or []:
                parts += (candidate.content and candidate.content.parts) or []
                finish += [candidate.finish_reason.name] if candidate.finish_reason else []
            usage = answer.usage_metadata or None
            if usage:
                said.input_tokens = usage.prompt_token_count or 0
                said.output_tokens = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
        assert len(finish) == 1, finish
        (said.finish,) = finish
        for number, part in enumerate(parts):
            if part.function_call:
                said.calls.append((part.function_call.name, part.function_call.args))
                said.ids.append(part.function_call.id or f"call-{number}")
            elif part.thought:
                said.thinking += part.text or ""
            else:
                said.text += part.text or ""
                said.pieces += bool(part.text)
        self.contents.append(types.Content(role="model", parts=[part for part in parts if part.text != ""]))
        return said

    def fault(self, kind: str):
        client = ("bad_request", "unauthorized", "not_found", "rate_limit")
        if kind == "stream":
            return (genai_errors.APIError, *BROKEN, ValueError)
        return genai_errors.ClientError if kind in client else genai_errors.ServerError


class Ollama(Driver):
    """ollama: chat."""

    name = "ollama"
    finishes = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "stop"}

    def __init__(self, url: str, key: str, model: str, **_):
        headers = {"authorization": f"Bearer {key}"}
        self.client = ollama.Client(host=url, headers=headers, timeout=TIMEOUT_SECONDS)
        self.model = model
        self.messages: list = []

    def say(self, text: str, image: bool = False) -> None:
        images = {"images": [ollama.Image(value=PIXEL)]} if image else {}
        self.messages.append(ollama.Message(role="user", content=text, **images))

    def give(self, said: Said, results: list[str]) -> None:
        for (name, _), result in zip(said.calls, results, strict=True):
            self.messages.append(ollama.Message(role="tool", tool_name=name, content=result))

    def options(self, wish: Wish) -> dict:
        given = {"temperature": wish.temperature, "num_predict": wish.max_tokens, "stop": wish.stop}
        system = [ollama.Message(role="system", content=wish.system)] if wish.system else []
        options: dict = {"model": self.model, "messages": [*system, *self.messages], "think": wish.thinking or None}
        options["options"] = {name: value for name, value in given.items() if value is not None}
        if wish.tools:
            name, description, schema = WEATHER
            function = {"name": name, "description": description, "parameters": schema}
            options["tools"] = [{"type": "function", "function": function}]
        if wish.json_schema:
            options["format"] = wish.json_schema
        return options

    def ask(self, wish: Wish, stream: bool) -> Said:
        said, answers = Said(), self.client.chat(**self.options(wish), stream=stream)
        whole = ollama.Message(role="assistant", content="")
        for answer in answers if stream else [answers]:
            message = answer.message
            said.pieces += bool(message.content)
            if stream and message.content:
                self.heard()
            whole.content += message.content or ""
            said.thinking += message.thinking or ""
            whole.tool_calls = [*(whole.tool_calls or []), *(message.tool_calls or [])] or None
            last = answer
        assert last.done and last.total_duration > 0, last
        said.text, said.finish = whole.content, last.done_reason
        said.input_tokens, said.output_tokens = last.prompt_eval_count, last.eval_count
        for number, call in enumerate(whole.tool_calls or []):
            said.calls.append((call.function.name, dict(call.function.arguments)))
            said.ids.append(f"call-{number}")
        whole.thinking = said.thinking or None
        self.messages.append(whole)
        return said

    def fault(self, kind: str):
        if kind == "stream":
            return (ollama.ResponseError, *BROKEN, ValueError)
        return ollama.ResponseError


DRIVERS = {driver.name: driver for driver in (OpenAiChat, OpenAiResponses, Anthropic, Gemini, Ollama)}


def status_of(error: Exception) -> int | None:
    """The HTTP status that an SDK's exception carries."""
    return getattr(error, "status_code", None) or getattr(error, "code", None)
