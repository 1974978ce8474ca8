"""OpenAI as published: chat completions, completions, responses, embeddings, models, moderations; Azure's URL form too.

References: platform.openai.com/docs/api-reference (chat, responses, embeddings, errors);
learn.microsoft.com/azure/ai-services/openai/reference.
"""

from __future__ import annotations

import base64
import json
import re
import struct

from providers.brain import Answer, Ask, pieces, split_json, think
from providers.server import Provider, Refused, Reply, Seen, Stream, parse, sse

CHAT_FIELDS = set(
    "model messages max_completion_tokens max_tokens temperature top_p n stop seed logit_bias presence_penalty "
    "frequency_penalty logprobs top_logprobs response_format tools tool_choice parallel_tool_calls stream stream_options "
    "reasoning_effort verbosity prediction service_tier metadata store user safety_identifier prompt_cache_key "
    "prompt_cache_retention modalities audio web_search_options functions function_call".split()
)
RESPONSE_FIELDS = set(
    "model input instructions max_output_tokens max_tool_calls temperature top_p top_logprobs text tools tool_choice "
    "parallel_tool_calls stream stream_options reasoning service_tier metadata store user safety_identifier "
    "prompt_cache_key prompt_cache_retention previous_response_id conversation background include truncation prompt".split()
)
EMBEDDING_FIELDS = {"model", "input", "dimensions", "encoding_format", "user"}
FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls", "refusal": "stop"}
# Tools that run at OpenAI itself, and the items of their calls.
BUILT_IN = {"web_search", "file_search", "mcp", "custom", "code_interpreter"}
CALLS_OF_BUILT_IN = {"web_search_call", "file_search_call", "mcp_call", "custom_tool_call", "custom_tool_call_output"}
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CREATED = 1_700_000_000


class OpenAi(Provider):
    key = "sk-upstream-openai"
    models = ("mock-model", "mock-large")
    # Behaves as Azure's deployments do: its URL form and its header.
    azure = False
    # Reasoning under the name that compatible servers use, when thinking was asked for; OpenAI itself says nothing.
    reasoning = "reasoning_content"

    def check_key(self, seen: Seen) -> None:
        given = seen.headers.get("api-key") if self.azure else seen.headers.get("authorization")
        if given != (self.key if self.azure else f"Bearer {self.key}"):
            raise Refused(401, "Incorrect API key provided.", "invalid_api_key")

    def error(self, refused: Refused) -> Reply:
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(refused.status)
        code = refused.kind or {404: "model_not_found", 429: "rate_limit_exceeded"}.get(refused.status)
        error = {
            "message": refused.message,
            "type": kind or "invalid_request_error",
            "param": refused.param,
            "code": code,
        }
        return Reply({"error": error}, refused.status, {"x-request-id": "req_upstream"})

    def answer(self, seen: Seen) -> Reply | Stream:
        path = seen.path
        if self.azure:
            match = re.fullmatch(r"/openai/deployments/([^/]+)(/.*)", path)
            if not match or not seen.query.get("api-version"):
                raise Refused(404, "Resource not found", "404")
            path = "/v1" + match[2]
        if seen.method == "GET":
            return self._models(path)
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._complete,
            "/v1/responses": self._respond,
            "/v1/responses/input_tokens": self._count,
            "/v1/embeddings": self._embed,
            "/v1/moderations": self._moderate,
        }
        if path not in posts:
            raise Refused(404, f"Invalid URL (POST {seen.path})", "unknown_url")
        body = parse(seen)
        if not self.azure:
            need(body, "model", str)
            if body["model"] not in self.models:
                raise Refused(404, f"The model `{body['model']}` does not exist", "model_not_found")
        return posts[path](body)

    def _models(self, path: str) -> Reply:
        listed = [{"id": id, "object": "model", "created": CREATED, "owned_by": "mock"} for id in self.models]
        if path == "/v1/models":
            return Reply({"object": "list", "data": listed})
        for model in listed:
            if path == f"/v1/models/{model['id']}":
                return Reply(model)
        raise Refused(404, "Not found")

    def _chat(self, body: dict) -> Reply | Stream:
        known(body, CHAT_FIELDS)
        bounded(body, "user", "safety_identifier", "prompt_cache_key")
        ask = chat_ask(body)
        n = body.get("n") or 1
        answer = think(ask)
        usage = chat_usage(answer, n)
        head = {"id": "chatcmpl-mock", "created": CREATED, "model": body.get("model", "deployment")}
        head |= {"service_tier": "default", "system_fingerprint": "fp_mock"}
        if body.get("stream"):
            options = body.get("stream_options") or {}
            return self._chat_stream(head, answer, n, usage if options.get("include_usage") else None)
        message = {"role": "assistant", "content": answer.text or None, "refusal": None, "annotations": []}
        if answer.finish == "refusal":
            message |= {"content": None, "refusal": answer.text}
        if answer.thinking:
            message[self.reasoning] = answer.thinking
        if answer.calls:
            message["tool_calls"] = [call_of(number, *call) for number, call in enumerate(answer.calls)]
        choice = {"message": message, "logprobs": None, "finish_reason": FINISH[answer.finish]}
        choices = [{"index": index, **choice} for index in range(n)]
        return Reply(head | {"object": "chat.completion", "choices": choices, "usage": usage})

    def _chat_stream(self, head: dict, answer: Answer, n: int, usage: dict | None) -> Stream:
        events = []

        def chunk(choices, **more):
            last = {} if usage is None else {"usage": None}
            events.append(sse(head | {"object": "chat.completion.chunk", "choices": choices} | last | more))

        def delta(index, delta, finish=None):
            chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}])

        for index in range(n):
            delta(index, {"role": "assistant", "content": None if answer.calls else "", "refusal": None})
            for piece in pieces(answer.thinking):
                delta(index, {self.reasoning: piece})
            for piece in pieces(answer.text):
                delta(index, {"refusal" if answer.finish == "refusal" else "content": piece})
            for number, (name, arguments) in enumerate(answer.calls):
                call = call_of(number, name, {})
                call["function"]["arguments"] = ""
                delta(index, {"tool_calls": [{"index": number, **call}]})
                for piece in split_json(json.dumps(arguments)):
                    delta(index, {"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
            delta(index, {}, FINISH[answer.finish])
        if usage is not None:
            chunk([], usage=usage)
        events.append(sse("[DONE]"))
        return Stream(events, sse({"error": stream_error()}), closing=1, headers={"x-request-id": "req_upstream"})

    def _complete(self, body: dict) -> Reply | Stream:
        need(body, "prompt", (str, list))
        prompt = body["prompt"] if isinstance(body["prompt"], str) else str(body["prompt"])
        limit = body.get("max_tokens", 16)
        answer = think(Ask(user=prompt, texts=[prompt], max_tokens=limit, stop=stops(body.get("stop"))))
        head = {"id": "cmpl-mock", "object": "text_completion", "created": CREATED, "model": body.get("model")}
        choice = {"index": 0, "logprobs": None}
        finish = FINISH[answer.finish]
        if not body.get("stream"):
            choices = [choice | {"text": answer.text, "finish_reason": finish}]
            return Reply(head | {"choices": choices, "usage": chat_usage(answer, 1)})
        events = [
            sse(head | {"choices": [choice | {"text": piece, "finish_reason": None}]}) for piece in pieces(answer.text)
        ]
        events.append(sse(head | {"choices": [choice | {"text": "", "finish_reason": finish}]}))
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(sse(head | {"choices": [], "usage": chat_usage(answer, 1)}))
        return Stream([*events, sse("[DONE]")], sse({"error": stream_error()}), closing=1)

    def _embed(self, body: dict) -> Reply:
        known(body, EMBEDDING_FIELDS)
        bounded(body, "user")
        need(body, "input", (str, list))
        inputs = body["input"] if isinstance(body["input"], list) and body["input"] else [body["input"]]
        if inputs and isinstance(inputs[0], int):
            inputs = [inputs]
        if any(text in ("", []) for text in inputs):
            raise Refused(400, "Input cannot be an empty string.", param="input")
        data = []
        for index, text in enumerate(inputs):
            values = vector(str(text), body.get("dimensions") or 8)
            if body.get("encoding_format") == "base64":
                values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
            data.append({"object": "embedding", "index": index, "embedding": values})
        tokens = sum(len(str(text).split()) for text in inputs)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return Reply({"object": "list", "data": data, "model": body.get("model"), "usage": usage})

    def _moderate(self, body: dict) -> Reply:
        result = {"flagged": False, "categories": {"violence": False}, "category_scores": {"violence": 0.01}}
        return Reply({"id": "modr-mock", "model": body["model"], "results": [result]})

    def _count(self, body: dict) -> Reply:
        known(body, RESPONSE_FIELDS)
        if body.get("previous_response_id"):
            raise Refused(400, "Previous response not found.", "previous_response_not_found", "previous_response_id")
        answer = think(response_ask(body))
        return Reply({"object": "response.input_tokens", "input_tokens": answer.input_tokens})

    def _respond(self, body: dict) -> Reply | Stream:
        known(body, RESPONSE_FIELDS)
        bounded(body, "user", "safety_identifier", "prompt_cache_key")
        if body.get("previous_response_id"):
            raise Refused(400, "Previous response not found.", "previous_response_not_found", "previous_response_id")
        answer = think(response_ask(body))
        response = response_of(body, answer)
        if not body.get("stream"):
            return Reply(response)
        return response_stream(response)


def bounded(body: dict, *names: str) -> None:
    for name in names:
        length = len(body.get(name) or "")
        if length > 64:
            message = f"Invalid '{name}': string too long. Expected a string with maximum length 64, but got a string with length {length} instead."
            raise Refused(400, message, "string_above_max_length", name)


def need(body: dict, name: str, kind) -> None:
    if name not in body or body[name] is None:
        raise Refused(400, f"Missing required parameter: '{name}'.", "missing_required_parameter", name)
    if not isinstance(body[name], kind):
        raise Refused(400, f"Invalid type for '{name}'.", "invalid_type", name)


def known(body: dict, fields: set[str]) -> None:
    for name in body:
        if name not in fields:
            raise Refused(400, f"Unrecognized request argument supplied: {name}", "unknown_parameter", name)


def stops(stop) -> list[str]:
    stop = [stop] if isinstance(stop, str) else stop or []
    if len(stop) > 4:
        raise Refused(400, "Invalid 'stop': array too long.", "array_above_max_length", "stop")
    return stop


def between(body: dict, name: str, low: float, high: float) -> None:
    value = body.get(name)
    if value is not None and not (isinstance(value, int | float) and low <= value <= high):
        code = "decimal_above_max_value" if isinstance(value, int | float) and value > high else "invalid_value"
        raise Refused(400, f"Invalid '{name}': expected a value between {low} and {high}.", code, name)


def content_text(content, where: str, images: list[str] | None = None) -> str:
    """Text of a message's content; image parts are collected where they are allowed."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not content:
        raise Refused(400, f"Invalid value for '{where}'.", "invalid_type", where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text"):
            texts.append(part["text"])
        elif kind == "refusal":
            texts.append(part["refusal"])
        elif kind in ("image_url", "input_image") and images is not None:
            url = part["image_url"]["url"] if kind == "image_url" else part["image_url"]
            images.append(url[5:].split(";")[0] if url.startswith("data:") else "url")
        elif kind == "input_file" and images is not None:
            need(part, "file_data" if "file_id" not in part else "file_id", str)
        else:
            raise Refused(400, f"Invalid value: '{kind}'.", "invalid_value", f"{where}[{number}].type")
    return "".join(texts)


def chat_ask(body: dict) -> Ask:
    """Checks a chat request and reads it."""
    need(body, "messages", list)
    if not body["messages"]:
        raise Refused(400, "Invalid 'messages': empty array.", "empty_array", "messages")
    for name, low, high in [("temperature", 0, 2), ("top_p", 0, 1), ("n", 1, 128), ("top_logprobs", 0, 20)]:
        between(body, name, low, high)
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise Refused(400, "'top_logprobs' needs 'logprobs'.", None, "top_logprobs")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise Refused(400, "'stream_options' is only allowed when 'stream' is enabled.", None, "stream_options")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise Refused(400, "Invalid 'max_tokens': below minimum value.", "integer_below_min_value", "max_tokens")
    ask = Ask(max_tokens=limit, stop=stops(body.get("stop")))
    ask.thinking = body.get("reasoning_effort") not in (None, "none")
    form = body.get("response_format") or {}
    ask.json = form.get("type") in ("json_object", "json_schema")
    if (form.get("json_schema") or {}).get("strict"):
        strict_schema(form["json_schema"]["schema"], "response_format")
    chat_tools(body, ask)
    chat_messages(body["messages"], ask)
    return ask


def chat_tools(body: dict, ask: Ask) -> None:
    for number, tool in enumerate(body.get("tools") or []):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not function or not NAME.fullmatch(function.get("name") or ""):
            raise Refused(400, f"Invalid 'tools[{number}]'.", "invalid_value", f"tools[{number}].function.name")
        schema(function.get("parameters"), f"tools[{number}].function.parameters", bool(function.get("strict")))
        ask.tools.append(function["name"])
    if body.get("tools") == []:
        raise Refused(400, "Invalid 'tools': empty array.", "empty_array", "tools")
    choice = body.get("tool_choice")
    if choice is not None and not ask.tools:
        raise Refused(400, "'tool_choice' is only allowed when 'tools' are specified.", None, "tool_choice")
    if body.get("parallel_tool_calls") is not None and not ask.tools:
        message = "'parallel_tool_calls' is only allowed when 'tools' are specified."
        raise Refused(400, message, None, "parallel_tool_calls")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if name not in ask.tools:
            raise Refused(400, f"Tool choice '{name}' not found in 'tools'.", None, "tool_choice")
        ask.choice = f"name:{name}"
    elif choice is not None:
        if choice not in ("auto", "none", "required"):
            raise Refused(400, f"Invalid value: '{choice}'.", "invalid_value", "tool_choice")
        ask.choice = choice
    ask.parallel = body.get("parallel_tool_calls") is not False


# Keywords that no strict schema may have.
NOT_STRICT = set(
    "minLength maxLength uniqueItems propertyNames minProperties maxProperties default oneOf allOf not".split()
)


def strict_schema(schema, where: str) -> None:
    """What a strict schema must say: every object forbids other properties, and requires all of its own."""
    if not isinstance(schema, dict):
        return
    for key in schema.keys() & NOT_STRICT:
        fault = f"'{key}' is not permitted."
        raise Refused(400, f"Invalid schema: In context={where}, {fault}", "invalid_json_schema", where)
    if schema.get("type") == "object" or "properties" in schema:
        if schema.get("additionalProperties") is not False:
            fault = "'additionalProperties' is required to be supplied and to be false."
            raise Refused(400, f"Invalid schema: In context={where}, {fault}", "invalid_json_schema", where)
        if set(schema.get("required") or []) != set(schema.get("properties") or {}):
            fault = "'required' is required to be supplied and to be an array including every key in properties."
            raise Refused(400, f"Invalid schema: In context={where}, {fault}", "invalid_json_schema", where)
    for inner in [*(schema.get("properties") or {}).values(), *(schema.get("anyOf") or []), schema.get("items")]:
        strict_schema(inner, where)


def schema(parameters, where: str, strict: bool = False) -> None:
    if parameters is not None and (not isinstance(parameters, dict) or parameters.get("type") not in (None, "object")):
        raise Refused(400, f"Invalid schema: '{where}' must be of type object.", "invalid_function_parameters", where)
    if strict:
        strict_schema(parameters, where)


def chat_messages(messages: list, ask: Ask) -> None:
    """Roles, and each tool call answered by the messages right after it."""
    open_calls: set[str] = set()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise Refused(400, f"Invalid value: '{role}'.", "invalid_value", f"{where}.role")
        if role != "tool" and open_calls:
            fault = "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'."
            raise Refused(400, fault, None, f"{where}.role")
        images = [] if role == "user" else None
        if role != "assistant" and message.get("content") is None:
            raise Refused(400, "Invalid value for 'content': expected a string, got null.", None, f"{where}.content")
        text = content_text(message.get("content"), f"{where}.content", images)
        ask.texts.append(text)
        if role in ("system", "developer"):
            ask.system += ("\n" if ask.system else "") + text
        elif role == "user":
            ask.user, ask.images, ask.results = text, images, []
        elif role == "tool":
            if message.get("tool_call_id") not in open_calls:
                fault = "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
                raise Refused(400, fault, None, f"{where}.role")
            open_calls.discard(message["tool_call_id"])
            ask.results.append(text)
        else:
            open_calls = {checked_call(call, where) for call in message.get("tool_calls") or []}
            if message.get("content") is None and not open_calls and not message.get("refusal"):
                raise Refused(
                    400, "Invalid value for 'content': expected a string, got null.", None, f"{where}.content"
                )
            if open_calls or text:
                ask.results = []
    if open_calls:
        raise Refused(400, "The last tool calls have no answers.", None, "messages")


def checked_call(call: dict, where: str) -> str:
    if call.get("type") != "function" or not isinstance((call.get("function") or {}).get("arguments"), str):
        raise Refused(400, "Invalid 'tool_calls'.", "invalid_value", f"{where}.tool_calls")
    if not NAME.fullmatch(call["function"].get("name") or "") or not call.get("id"):
        raise Refused(400, "Invalid 'tool_calls'.", "invalid_value", f"{where}.tool_calls")
    return call["id"]


def call_of(number: int, name: str, arguments: dict) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_mock{number}", "type": "function", "function": function}


def chat_usage(answer: Answer, n: int) -> dict:
    completion = answer.output_tokens * n
    return {
        "prompt_tokens": answer.input_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.input_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": answer.thinking_tokens, "audio_tokens": 0},
    }


def stream_error() -> dict:
    message = "The server had an error while processing your request."
    return {"message": message, "type": "server_error", "param": None, "code": "server_error"}


def vector(text: str, length: int) -> list[float]:
    """A unit vector that follows from the text, exactly representable."""
    values = [((sum(text.encode()) + 31 * index) % 64 - 32) / 64 for index in range(length)]
    return [struct.unpack("<f", struct.pack("<f", value))[0] for value in values]


def response_ask(body: dict) -> Ask:
    """Checks a Responses request and reads it."""
    need(body, "input", (str, list))
    between(body, "temperature", 0, 2)
    between(body, "top_p", 0, 1)
    limit = body.get("max_output_tokens")
    if limit is not None and limit < 16:
        message = f"Invalid 'max_output_tokens': integer below minimum value. Expected a value >= 16, but got {limit} instead."
        raise Refused(400, message, "integer_below_min_value", "max_output_tokens")
    ask = Ask(max_tokens=limit, system=body.get("instructions") or "")
    ask.texts.append(ask.system)
    ask.thinking = bool(body.get("reasoning") and body["reasoning"].get("effort") not in (None, "none"))
    form = (body.get("text") or {}).get("format") or {}
    ask.json = form.get("type") in ("json_object", "json_schema")
    if form.get("strict", True) and "schema" in form:
        strict_schema(form["schema"], "text.format.schema")
    ask.parallel = body.get("parallel_tool_calls") is not False
    for number, tool in enumerate(body.get("tools") or []):
        if tool.get("type") in BUILT_IN:
            continue
        if tool.get("type") != "function" or not NAME.fullmatch(tool.get("name") or ""):
            raise Refused(400, f"Missing required parameter: 'tools[{number}].name'.", None, f"tools[{number}].name")
        # Strict is the default of this API, for functions that can be.
        schema(tool.get("parameters"), f"tools[{number}].parameters", bool(tool.get("strict")))
        ask.tools.append(tool["name"])
    choice = body.get("tool_choice")
    ask.choice = f"name:{choice['name']}" if isinstance(choice, dict) else choice or "auto"
    items = [{"role": "user", "content": body["input"]}] if isinstance(body["input"], str) else body["input"]
    open_calls: set[str] = set()
    for number, item in enumerate(items):
        response_item(item, f"input[{number}]", ask, open_calls)
    if open_calls:
        raise Refused(400, f"No tool output found for function call {min(open_calls)}.", None, "input")
    return ask


def response_item(item: dict, where: str, ask: Ask, open_calls: set[str]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        images: list[str] = []
        for part in item["content"] if isinstance(item["content"], list) else []:
            if (part.get("type") == "output_text") != (item.get("role") == "assistant"):
                raise Refused(400, f"Invalid value: '{part.get('type')}'.", "invalid_value", f"{where}.content")
        text = content_text(item.get("content"), f"{where}.content", images)
        ask.texts.append(text)
        if item.get("role") in ("system", "developer"):
            ask.system += ("\n" if ask.system else "") + text
        elif item.get("role") == "user":
            ask.user, ask.images, ask.results = text, images, []
        elif item.get("role") != "assistant":
            raise Refused(400, f"Invalid value: '{item.get('role')}'.", "invalid_value", f"{where}.role")
    elif kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            if not isinstance(item.get(name), str):
                raise Refused(400, f"Missing required parameter: '{where}.{name}'.", None, f"{where}.{name}")
        open_calls.add(item["call_id"])
        ask.results = []
    elif kind == "function_call_output":
        if item.get("call_id") not in open_calls:
            message = f"No tool call found for function call output with call_id {item.get('call_id')}."
            raise Refused(400, message, None, "input")
        open_calls.discard(item["call_id"])
        ask.results.append(content_text(item["output"], where, []))
        ask.texts.append(ask.results[-1])
    elif kind in CALLS_OF_BUILT_IN:
        pass
    elif kind == "reasoning":
        if not isinstance(item.get("summary"), list):
            raise Refused(400, f"Missing required parameter: '{where}.summary'.", None, f"{where}.summary")
        if not (item.get("encrypted_content") or "gAAAA").startswith("gAAAA"):
            fault = f"The encrypted content {item['encrypted_content'][:4]}... could not be verified."
            raise Refused(400, fault, "invalid_encrypted_content", where)
    else:
        raise Refused(400, f"Invalid value: '{kind}'.", "invalid_value", f"{where}.type")


def response_of(body: dict, answer: Answer) -> dict:
    output = []
    if answer.thinking:
        summary = [{"type": "summary_text", "text": answer.thinking}]
        output.append({"type": "reasoning", "id": "rs_mock", "summary": summary})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        if answer.finish == "refusal":
            part = {"type": "refusal", "refusal": answer.text}
        message = {"type": "message", "id": "msg_mock", "role": "assistant", "status": "completed", "content": [part]}
        output.append(message)
    for number, (name, arguments) in enumerate(answer.calls):
        call = {"type": "function_call", "id": f"fc_mock{number}", "call_id": f"call_mock{number}", "name": name}
        output.append(call | {"arguments": json.dumps(arguments), "status": "completed"})
    cut = answer.finish == "length"
    usage = {
        "input_tokens": answer.input_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.thinking_tokens},
        "total_tokens": answer.input_tokens + answer.output_tokens,
    }
    return {
        "id": "resp_mock",
        "object": "response",
        "created_at": CREATED,
        "status": "incomplete" if cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "model": body.get("model", "deployment"),
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "store": body.get("store") is not False,
        "temperature": body.get("temperature", 1.0),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": usage,
        "user": body.get("user"),
        "metadata": body.get("metadata") or {},
    }


def response_stream(response: dict) -> Stream:
    events: list[bytes] = []

    def say(kind, **fields):
        events.append(sse({"type": kind, "sequence_number": len(events), **fields}, kind))

    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    say("response.created", response=begun)
    say("response.in_progress", response=begun)
    for index, item in enumerate(response["output"]):
        here = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            say(
                "response.output_item.added", output_index=index, item=item | {"arguments": "", "status": "in_progress"}
            )
            for piece in split_json(item["arguments"]):
                say("response.function_call_arguments.delta", **here, delta=piece)
            say("response.function_call_arguments.done", **here, arguments=item["arguments"], name=item["name"])
        elif item["type"] == "reasoning":
            say("response.output_item.added", output_index=index, item=item | {"summary": []})
            (part,) = item["summary"]
            say("response.reasoning_summary_part.added", **here, summary_index=0, part=part | {"text": ""})
            for piece in pieces(part["text"]):
                say("response.reasoning_summary_text.delta", **here, summary_index=0, delta=piece)
            say("response.reasoning_summary_text.done", **here, summary_index=0, text=part["text"])
            say("response.reasoning_summary_part.done", **here, summary_index=0, part=part)
        else:
            say("response.output_item.added", output_index=index, item=item | {"content": [], "status": "in_progress"})
            (part,) = item["content"]
            key = "refusal" if part["type"] == "refusal" else "text"
            name = "refusal" if key == "refusal" else "output_text"
            say("response.content_part.added", **here, content_index=0, part=part | {key: ""})
            more = {} if key == "refusal" else {"logprobs": []}
            for piece in pieces(part[key]):
                say(f"response.{name}.delta", **here, content_index=0, delta=piece, **more)
            say(f"response.{name}.done", **here, content_index=0, **{key: part[key]}, **more)
            say("response.content_part.done", **here, content_index=0, part=part)
        say("response.output_item.done", output_index=index, item=item)
    say(f"response.{response['status']}", response=response)
    error = {
        "type": "error",
        "sequence_number": 2,
        "code": "server_error",
        "message": "The mock failed.",
        "param": None,
    }
    return Stream(events, sse(error, "error"), closing=1)
