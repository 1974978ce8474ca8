"""Anthropic as published: messages, count_tokens, models.

References: docs.anthropic.com/en/api/messages, /messages-streaming, /errors, /messages-count-tokens;
build-with-claude/extended-thinking and tool-use for the rules about blocks.
"""

from __future__ import annotations

import base64
import json
import re

from providers.brain import Answer, Ask, pieces, split_json, think, words
from providers.server import Provider, Refused, Reply, Seen, Stream, parse, sse

FIELDS = set(
    "model messages max_tokens system metadata stop_sequences stream temperature top_p top_k tools tool_choice thinking "
    "service_tier container context_management mcp_servers output_config cache_control inference_geo "
    "diagnostics speed user_profile_id workspace_id".split()
)
COUNT_FIELDS = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control"}
VERSIONS = ("2023-06-01", "2026-10-21")
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
STOPS = {"stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
SIGNATURE = base64.b64encode(b"mock signature of the thinking").decode()
IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class Anthropic(Provider):
    key = "sk-upstream-anthropic"
    models = ("mock-model", "mock-large")

    def check_key(self, seen: Seen) -> None:
        # The SDKs of 2026 send the key as a bearer token, older ones and the documentation's curl as x-api-key.
        given = seen.headers.get("x-api-key") or seen.headers.get("authorization", "").removeprefix("Bearer ")
        if given != self.key:
            raise Refused(401, "invalid x-api-key")

    def error(self, refused: Refused) -> Reply:
        kind = refused.kind or KINDS.get(refused.status, "api_error")
        body = {"type": "error", "error": {"type": kind, "message": refused.message}, "request_id": "req_upstream"}
        return Reply(body, refused.status, {"request-id": "req_upstream"})

    def answer(self, seen: Seen) -> Reply | Stream:
        if seen.headers.get("anthropic-version") not in VERSIONS:
            raise Refused(400, "anthropic-version: header is required")
        if seen.method == "GET" and seen.path == "/v1/models":
            return Reply({"data": [self._model(id) for id in self.models], "has_more": False})
        if seen.method == "GET" and seen.path.removeprefix("/v1/models/") in self.models:
            return Reply(self._model(seen.path.removeprefix("/v1/models/")))
        if seen.method != "POST" or seen.path not in ("/v1/messages", "/v1/messages/count_tokens"):
            raise Refused(404, "Not Found")
        body = parse(seen)
        counting = seen.path.endswith("count_tokens")
        for name in body:
            if name not in (COUNT_FIELDS if counting else FIELDS):
                raise Refused(400, f"{name}: Extra inputs are not permitted")
        for name in ("model", "messages") if counting else ("model", "messages", "max_tokens"):
            if body.get(name) is None:
                raise Refused(400, f"{name}: Field required")
        if body["model"] not in self.models:
            raise Refused(404, f"model: {body['model']}")
        ask = read(body)
        if counting:
            return Reply({"input_tokens": sum(len(words(text)) for text in ask.texts)})
        answer = think(ask)
        message = message_of(body["model"], answer)
        return stream_of(message) if body.get("stream") else Reply(message, headers={"request-id": "req_upstream"})

    def _model(self, id: str) -> dict:
        return {"type": "model", "id": id, "display_name": id, "created_at": "2026-01-01T00:00:00Z"}


def read(body: dict) -> Ask:
    """Checks a request and reads it."""
    limit = body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise Refused(400, "max_tokens: Input should be greater than or equal to 1")
    for name, high in (("temperature", 1), ("top_p", 1)):
        value = body.get(name)
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= high):
            raise Refused(400, f"{name}: range: 0..1")
    for stop in body.get("stop_sequences") or []:
        if not stop.strip():
            raise Refused(400, "stop_sequences: each stop sequence must contain non-whitespace")
    ask = Ask(max_tokens=limit, stop=list(body.get("stop_sequences") or []))
    read_thinking(body, ask)
    read_tools(body, ask)
    read_system(body.get("system"), ask)
    read_user_id((body.get("metadata") or {}).get("user_id") or "")
    form = (body.get("output_config") or {}).get("format")
    ask.json = bool(form)
    if form:
        closed_schema(form.get("schema"), "output_config.format.schema")
    read_messages(body["messages"], ask)
    return ask


# Keywords of a schema that an answer or a call can be held to.
HELD_TO = set(
    "type enum const anyOf allOf $ref $defs definitions default required additionalProperties properties".split()
)
HELD_TO |= set("items title description format pattern minItems".split())
FORMATS = set("date-time time date duration email hostname uri ipv4 ipv6 uuid".split())


def closed_schema(schema, where: str) -> None:
    """A schema that an answer or a call is held to: every object forbids other properties, and few keywords are known."""
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind == "object" and schema.get("additionalProperties") is not False:
        raise Refused(400, f"{where}: For 'object' type, 'additionalProperties' must be explicitly set to false")
    for key in schema.keys() - HELD_TO:
        raise Refused(400, f"{where}: For '{kind}' type, property '{key}' is not supported")
    if schema.get("minItems", 0) not in (0, 1):
        raise Refused(400, f"{where}: For 'array' type, 'minItems' values other than 0 or 1 are not supported")
    if schema.get("format", "date") not in FORMATS:
        raise Refused(400, f"{where}: String format '{schema['format']}' is not supported")
    maps = [schema.get(name) or {} for name in ("properties", "$defs", "definitions")]
    lists = [schema.get(name) or [] for name in ("anyOf", "allOf")]
    for inner in [*(one for each in maps for one in each.values()), *(one for each in lists for one in each)]:
        closed_schema(inner, where)
    closed_schema(schema.get("items"), where)


def read_user_id(user: str) -> None:
    if len(user) > 256:
        raise Refused(400, "metadata.user_id: String should have at most 256 characters")
    if "@" in user:
        fault = "user_id appears to contain an email address. Please send a uuid or hash value instead."
        raise Refused(400, f"metadata.user_id: {fault}")


def read_thinking(body: dict, ask: Ask) -> None:
    thinking = body.get("thinking") or {"type": "disabled"}
    if thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens")
        if not isinstance(budget, int) or budget < 1024:
            raise Refused(400, "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
        if ask.max_tokens is not None and budget >= ask.max_tokens:
            raise Refused(400, "`max_tokens` must be greater than `thinking.budget_tokens`.")
        if body.get("temperature") not in (None, 1):
            raise Refused(400, "`temperature` may only be set to 1 when thinking is enabled.")
        if body.get("top_k") is not None:
            raise Refused(400, "`top_k` must be unset when thinking is enabled.")
        if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
            raise Refused(400, "Thinking may not be enabled when tool_choice forces tool use.")
        ask.thinking = True
    elif thinking.get("type") == "adaptive":
        ask.thinking = True
    elif thinking.get("type") != "disabled":
        raise Refused(400, "thinking: Input tag found does not match any of the expected tags")


def read_tools(body: dict, ask: Ask) -> None:
    for number, tool in enumerate(body.get("tools") or []):
        for name in tool:
            if name not in ("type", "name", "description", "input_schema", "cache_control", "strict"):
                raise Refused(400, f"tools.{number}.custom.{name}: Extra inputs are not permitted")
        if not NAME.fullmatch(tool.get("name") or ""):
            raise Refused(400, f"tools.{number}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
        if not isinstance(tool.get("input_schema"), dict):
            raise Refused(400, f"tools.{number}.custom.input_schema: Field required")
        if tool["input_schema"].get("type") != "object":
            raise Refused(400, f"tools.{number}.custom.input_schema.type: Input should be 'object'")
        if tool.get("strict"):
            closed_schema(tool["input_schema"], f"tools.{number}.custom.input_schema")
        ask.tools.append(tool["name"])
    choice = body.get("tool_choice")
    if choice is None:
        return
    if not ask.tools:
        raise Refused(400, "tool_choice may only be specified while providing tools.")
    kinds = {"auto": "auto", "any": "required", "none": "none", "tool": f"name:{choice.get('name')}"}
    if choice.get("type") not in kinds:
        raise Refused(400, "tool_choice: Input tag found does not match any of the expected tags")
    if choice["type"] == "tool" and choice.get("name") not in ask.tools:
        raise Refused(400, f"Tool '{choice.get('name')}' not found in provided tools")
    ask.choice = kinds[choice["type"]]
    ask.parallel = not choice.get("disable_parallel_tool_use")


def read_system(system, ask: Ask) -> None:
    if isinstance(system, list):
        for number, block in enumerate(system):
            if block.get("type") != "text" or not block.get("text"):
                raise Refused(400, f"system.{number}: text content blocks must be non-empty")
        system = "".join(block["text"] for block in system)
    ask.system = system or ""
    ask.texts.append(ask.system)


def read_messages(messages: list, ask: Ask) -> None:
    """Roles; every tool_use answered in the next message, results first; no empty text."""
    if not messages:
        raise Refused(400, "messages: at least one message is required")
    if messages[0].get("role") != "user":
        raise Refused(400, 'messages: first message must use the "user" role')
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise Refused(400, f"{where}.role: Input should be 'user' or 'assistant'")
        for name in message:
            if name not in ("role", "content"):
                raise Refused(400, f"{where}.{name}: Extra inputs are not permitted")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        last = number == len(messages) - 1
        if not blocks or (content == "" and not (last and role == "assistant")):
            raise Refused(400, f"{where}: all messages must have non-empty content")
        open_calls = (
            read_user(blocks, where, ask, open_calls)
            if role == "user"
            else read_assistant(blocks, where, ask, open_calls)
        )
        if last and role == "assistant" and blocks[-1].get("text", "x").endswith((" ", "\n")):
            raise Refused(400, f"{where}: final assistant content cannot end with trailing whitespace")
    if open_calls:
        raise Refused(400, f"messages.{len(messages) - 1}: `tool_use` ids were found without `tool_result` blocks")
    if ask.thinking and ask.results:
        read_loop(messages)


def read_loop(messages: list) -> None:
    """With thinking, the assistant's turn that the last results answer must begin with its thinking."""
    number = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    kind = messages[number]["content"][0]["type"]
    if kind not in ("thinking", "redacted_thinking"):
        message = f"messages.{number}.content.0.type: Expected `thinking` or `redacted_thinking`, but found `{kind}`."
        raise Refused(
            400, message + " When `thinking` is enabled, a final `assistant` message must start with a thinking block."
        )


def read_user(blocks: list, where: str, ask: Ask, open_calls: list[str]) -> list[str]:
    texts, images, results, answered = [], [], [], []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            texts.append(text_block(block, f"{where}.content.{number}"))
        elif kind == "image":
            images.append(image_block(block, f"{where}.content.{number}"))
        elif kind == "tool_result":
            if texts or images:
                raise Refused(400, f"{where}: `tool_result` blocks must come first in the content")
            if block.get("tool_use_id") not in open_calls:
                message = f"{where}.content.{number}: unexpected `tool_use_id` found in `tool_result` blocks: {block.get('tool_use_id')}"
                raise Refused(
                    400,
                    message
                    + ". Each `tool_result` block must have a corresponding `tool_use` block in the previous message.",
                )
            answered.append(block["tool_use_id"])
            results.append(result_text(block, f"{where}.content.{number}"))
        else:
            raise Refused(
                400, f"{where}.content.{number}: Input tag '{kind}' found does not match any of the expected tags"
            )
    if set(answered) != set(open_calls) or len(answered) != len(open_calls):
        missing = ", ".join(id for id in open_calls if id not in answered)
        message = f"{where}: `tool_use` ids were found without `tool_result` blocks immediately after: {missing}."
        raise Refused(400, message)
    ask.texts.extend(texts + results)
    ask.user, ask.images, ask.results = "".join(texts), images, [] if texts else results
    return []


def read_assistant(blocks: list, where: str, ask: Ask, open_calls: list[str]) -> list[str]:
    if open_calls:
        raise Refused(400, f"{where}: `tool_use` ids were found without `tool_result` blocks immediately after")
    calls = []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        here = f"{where}.content.{number}"
        if kind == "text":
            ask.texts.append(text_block(block, here))
        elif kind == "thinking":
            if block.get("signature") != SIGNATURE:
                raise Refused(400, f"{here}: Invalid `signature` in `thinking` block")
        elif kind == "redacted_thinking":
            pass
        elif kind == "tool_use":
            if not re.fullmatch(r"[a-zA-Z0-9_-]+", block.get("id") or ""):
                raise Refused(400, f"{here}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
            if not isinstance(block.get("input"), dict):
                raise Refused(400, f"{here}.tool_use.input: Input should be a valid dictionary")
            if not NAME.fullmatch(block.get("name") or ""):
                raise Refused(400, f"{here}.tool_use.name: Field required")
            if block["id"] in calls:
                raise Refused(400, f"{where}: `tool_use` ids must be unique")
            calls.append(block["id"])
        else:
            raise Refused(400, f"{here}: Input tag '{kind}' found does not match any of the expected tags")
    return calls


def text_block(block: dict, where: str) -> str:
    for name in block:
        if name not in ("type", "text", "cache_control", "citations"):
            raise Refused(400, f"{where}.text.{name}: Extra inputs are not permitted")
    if not isinstance(block.get("text"), str) or not block["text"].strip():
        raise Refused(400, "messages: text content blocks must contain non-whitespace text")
    return block["text"]


def image_block(block: dict, where: str) -> str:
    source = block.get("source") or {}
    if source.get("type") == "url":
        return "url"
    if source.get("type") != "base64" or source.get("media_type") not in IMAGES:
        raise Refused(
            400,
            f"{where}.image.source.base64.media_type: Input should be 'image/jpeg', 'image/png', 'image/gif' or 'image/webp'",
        )
    try:
        base64.b64decode(source["data"], validate=True)
    except ValueError:
        raise Refused(400, f"{where}.image.source.base64.data: Input should be valid base64") from None
    return source["media_type"]


def result_text(block: dict, where: str) -> str:
    for name in block:
        if name not in ("type", "tool_use_id", "content", "is_error", "cache_control"):
            raise Refused(400, f"{where}.tool_result.{name}: Extra inputs are not permitted")
    content = block.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)
    return ("error: " if block.get("is_error") else "") + content


def message_of(model: str, answer: Answer) -> dict:
    content = []
    if answer.thinking:
        content.append({"type": "thinking", "thinking": answer.thinking, "signature": SIGNATURE})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for number, (name, arguments) in enumerate(answer.calls):
        content.append({"type": "tool_use", "id": f"toolu_mock{number}", "name": name, "input": arguments})
    usage = {
        "input_tokens": answer.input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "service_tier": "standard",
    }
    return {
        "id": "msg_mock",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "refusal" if answer.finish == "refusal" else STOPS[answer.finish],
        "stop_sequence": answer.stop,
        "usage": usage,
    }


def stream_of(message: dict) -> Stream:
    events = []

    def say(kind, **fields):
        events.append(sse({"type": kind, **fields}, kind))

    begun = message | {"content": [], "stop_reason": None, "stop_sequence": None}
    say("message_start", message=begun | {"usage": message["usage"] | {"output_tokens": 1}})
    say("ping")
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}[kind]
        say("content_block_start", index=index, content_block=block | empty)
        deltas = {
            "text": [{"type": "text_delta", "text": piece} for piece in pieces(block.get("text", ""))],
            "thinking": [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block.get("thinking", ""))],
            "tool_use": [
                {"type": "input_json_delta", "partial_json": piece}
                for piece in ["", *split_json(json.dumps(block.get("input")))]
            ],
        }[kind]
        if kind == "thinking":
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        for delta in deltas:
            say("content_block_delta", index=index, delta=delta)
        say("content_block_stop", index=index)
    end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    say("message_delta", delta=end, usage={"output_tokens": message["usage"]["output_tokens"]})
    say("message_stop")
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    return Stream(events, sse(error, "error"), closing=1, headers={"request-id": "req_upstream"})
