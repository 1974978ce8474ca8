"""Gemini as published: generateContent, streamGenerateContent, countTokens, embedContent, batchEmbedContents, models; Vertex's
URLs too.

References: ai.google.dev/api/generate-content, /api/caching#Schema, /api/embeddings, gemini-api/docs/thought-signatures,
gemini-api/docs/function-calling.
"""

from __future__ import annotations

import base64
import json
import re

from providers.brain import Answer, Ask, pieces, think, words
from providers.openai import vector
from providers.server import Provider, Refused, Reply, Seen, Stream, parse, sse

FIELDS = {"contents", "systemInstruction", "tools", "toolConfig", "safetySettings", "generationConfig", "cachedContent"}
FIELDS |= {"model", "labels", "serviceTier", "store"}
CONFIG_FIELDS = set(
    "stopSequences responseMimeType responseSchema responseJsonSchema _responseJsonSchema responseModalities "
    "candidateCount maxOutputTokens temperature topP topK seed presencePenalty frequencyPenalty responseLogprobs logprobs "
    "enableEnhancedCivicAnswers speechConfig thinkingConfig imageConfig mediaResolution".split()
)
# What a Schema may say; JSON Schema proper goes to parametersJsonSchema.
SCHEMA_FIELDS = set(
    "type format title description nullable enum maxItems minItems properties required minProperties maxProperties "
    "minLength maxLength pattern example anyOf propertyOrdering default items minimum maximum".split()
)
TYPES = {"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"}
STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
DATA = {"text", "inlineData", "functionCall", "functionResponse", "fileData", "executableCode", "codeExecutionResult"}
NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}")
FINISH = {"stop": "STOP", "stop_sequence": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP", "refusal": "SAFETY"}
# What the documentation allows in place of a signature, for calls that another model made.
DUMMIES = ("skip_thought_signature_validator", "context_engineering_is_the_way_to_go")
SIGNATURE = base64.b64encode(b"mock thought signature").decode()


class Gemini(Provider):
    key = "sk-upstream-gemini"
    # A model with "-3" in its name wants its thought signatures back, as Gemini 3 does.
    models = ("mock-model", "mock-3-model")
    vertex = False

    def check_key(self, seen: Seen) -> None:
        if self.vertex:
            good = seen.headers.get("authorization") == f"Bearer {self.key}"
        else:
            good = seen.headers.get("x-goog-api-key") == self.key or seen.query.get("key") == [self.key]
        if not good:
            raise Refused(400, "API key not valid. Please pass a valid API key.")

    def error(self, refused: Refused) -> Reply:
        status = refused.kind or STATUSES.get(refused.status, "UNKNOWN")
        error = {"code": refused.status, "message": refused.message, "status": status}
        return Reply({"error": error}, refused.status)

    def answer(self, seen: Seen) -> Reply | Stream:
        base = r"/v1/projects/[^/]+/locations/[^/]+/publishers/google/models" if self.vertex else r"/v1(?:beta)?/models"
        match = re.fullmatch(base + r"(?:/([^/:]+)(?::(\w+))?)?", seen.path)
        if not match:
            raise Refused(404, "Not Found")
        model, method = match.groups()
        if seen.method == "GET":
            return self._models(model)
        if model not in self.models:
            raise Refused(404, f"models/{model} is not found for API version v1beta, or is not supported for {method}.")
        body = camel(parse(seen))
        if method in ("generateContent", "streamGenerateContent"):
            return self._generate(body, model, seen if method.startswith("stream") else None)
        if method == "countTokens":
            ask = read(body.get("generateContentRequest") or body, model)
            return Reply({"totalTokens": sum(len(words(text)) for text in ask.texts)})
        if method == "embedContent":
            return Reply({"embedding": {"values": embedded(body)}})
        if method == "batchEmbedContents":
            for number, request in enumerate(body["requests"]):
                if request.get("model") != f"models/{model}":
                    raise Refused(400, f"* BatchEmbedContentsRequest.requests[{number}].model: model name mismatch")
            return Reply({"embeddings": [{"values": embedded(request)} for request in body["requests"]]})
        raise Refused(404, f"Unknown method {method}")

    def _models(self, model: str | None) -> Reply:
        listed = [
            {"name": f"models/{id}", "version": "1", "inputTokenLimit": 8192, "outputTokenLimit": 2048}
            for id in self.models
        ]
        if model is None:
            return Reply({"models": listed})
        if model not in self.models:
            raise Refused(404, f"models/{model} is not found")
        return Reply(listed[self.models.index(model)])

    def _generate(self, body: dict, model: str, stream: Seen | None) -> Reply | Stream:
        known(body, FIELDS, "")
        ask = read(body, model)
        if self.vertex:
            refuse_ids(body["contents"])
        answer = think(ask)
        chunks = chunks_of(answer, model, whole=stream is None)
        if stream is None:
            return Reply(chunks[0])
        error = {"error": {"code": 503, "message": "The model is overloaded.", "status": "UNAVAILABLE"}}
        if stream.query.get("alt") == ["sse"]:
            return Stream([sse(chunk) for chunk in chunks], sse(error))
        texts = [json.dumps(chunk).encode() for chunk in chunks]
        events = [(b"[" if number == 0 else b",\r\n") + text for number, text in enumerate(texts)]
        return Stream([*events, b"]"], b"," + json.dumps(error).encode() + b"]", content_type="application/json")


def camel(value):
    """Proto JSON takes both spellings of a field's name; what a person names (arguments, properties) stays."""
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    free = (
        "args",
        "response",
        "properties",
        "parametersJsonSchema",
        "responseJsonSchema",
        "_responseJsonSchema",
        "labels",
    )
    out = {}
    for spelled, inner in value.items():
        name = re.sub(r"(?<!^)_([a-z])", lambda match: match[1].upper(), spelled)
        if name == "properties" and isinstance(inner, dict):
            out[name] = {key: camel(schema) for key, schema in inner.items()}
        else:
            out[name] = inner if name in free else camel(inner)
    return out


def known(value: dict, fields: set[str], where: str) -> None:
    if not isinstance(value, dict):
        raise Refused(400, f"Invalid value at '{where}'")
    for name in value:
        if name not in fields:
            place = f" at '{where}'" if where else ""
            raise Refused(400, f'Invalid JSON payload received. Unknown name "{name}"{place}: Cannot find field.')


def read(body: dict, model: str) -> Ask:
    """Checks a request and reads it."""
    if not body.get("contents"):
        raise Refused(400, "* GenerateContentRequest.contents: contents is not specified")
    config = body.get("generationConfig") or {}
    known(config, CONFIG_FIELDS, "generation_config")
    for name, low, high in (("temperature", 0, 2), ("topP", 0, 1), ("candidateCount", 1, 8)):
        value = config.get(name)
        if value is not None and not low <= value <= high:
            raise Refused(
                400, f"* GenerateContentRequest.generation_config.{name}: must be in the range [{low}, {high}]."
            )
    limit = config.get("maxOutputTokens")
    if limit is not None and limit < 1:
        raise Refused(400, "max_output_tokens must be positive.")
    stop = config.get("stopSequences") or []
    if len(stop) > 5:
        raise Refused(400, "The number of stop sequences must be at most 5.")
    ask = Ask(max_tokens=limit, stop=stop)
    thinking = config.get("thinkingConfig") or {}
    known(thinking, {"includeThoughts", "thinkingBudget", "thinkingLevel"}, "generation_config.thinking_config")
    ask.thinking = bool(thinking.get("includeThoughts"))
    read_format(config, ask)
    read_tools(body, ask)
    if system := body.get("systemInstruction"):
        known(system, {"role", "parts"}, "system_instruction")
        ask.system = "".join(part["text"] for part in system["parts"])
        ask.texts.append(ask.system)
    read_contents(body["contents"], ask, strict="-3" in model)
    return ask


def read_format(config: dict, ask: Ask) -> None:
    mime = config.get("responseMimeType", "text/plain")
    if mime not in ("text/plain", "application/json", "text/x.enum"):
        raise Refused(
            400, "* GenerateContentRequest.generation_config.response_mime_type: allowed mimetypes are `text/plain`…"
        )
    ask.json = mime == "application/json"
    has_schema = any(config.get(name) for name in ("responseSchema", "responseJsonSchema", "_responseJsonSchema"))
    if has_schema and mime == "text/plain":
        raise Refused(
            400,
            "* GenerateContentRequest.generation_config.response_schema: only allowed when response_mime_type is `application/json`.",
        )
    if config.get("responseSchema"):
        check_schema(config["responseSchema"], "generation_config.response_schema")


def check_schema(schema: dict, where: str) -> None:
    known(schema, SCHEMA_FIELDS, where)
    if "type" in schema and str(schema["type"]).upper() not in TYPES:
        raise Refused(
            400, f"Invalid value at '{where}.type' (type.googleapis.com/google.ai.generativelanguage.v1beta.Type)"
        )
    for name, inner in (schema.get("properties") or {}).items():
        check_schema(inner, f"{where}.properties[{name}].value")
    if schema.get("items") is not None:
        check_schema(schema["items"], f"{where}.items")
    for number, inner in enumerate(schema.get("anyOf") or []):
        check_schema(inner, f"{where}.any_of[{number}]")


def read_tools(body: dict, ask: Ask) -> None:
    for number, tool in enumerate(body.get("tools") or []):
        known(tool, {"functionDeclarations", "googleSearch", "codeExecution", "urlContext"}, f"tools[{number}]")
        for index, function in enumerate(tool.get("functionDeclarations") or []):
            where = f"tools[{number}].function_declarations[{index}]"
            fields = {
                "name",
                "description",
                "parameters",
                "parametersJsonSchema",
                "response",
                "responseJsonSchema",
                "behavior",
            }
            known(function, fields, where)
            if not NAME.fullmatch(function.get("name") or ""):
                raise Refused(400, f"* GenerateContentRequest.{where}.name: Invalid function name.")
            if function.get("parameters") is not None and function.get("parametersJsonSchema") is not None:
                raise Refused(400, f"* {where}: parameters and parameters_json_schema are mutually exclusive")
            if function.get("parameters") is not None:
                check_schema(function["parameters"], f"{where}.parameters")
            ask.tools.append(function["name"])
    config = body.get("toolConfig") or {}
    known(config, {"functionCallingConfig", "retrievalConfig"}, "tool_config")
    calling = config.get("functionCallingConfig") or {}
    known(calling, {"mode", "allowedFunctionNames"}, "tool_config.function_calling_config")
    mode = calling.get("mode", "AUTO")
    names = calling.get("allowedFunctionNames") or []
    if names and mode not in ("ANY", "VALIDATED"):
        raise Refused(400, "allowed_function_names should only be set when the mode is ANY or VALIDATED.")
    if any(name not in ask.tools for name in names):
        raise Refused(400, "allowed_function_names contains a function that is not declared.")
    if mode == "ANY":
        ask.choice = f"name:{names[0]}" if names else "required"
    elif mode == "NONE":
        ask.choice = "none"


def read_contents(contents: list, ask: Ask, strict: bool) -> None:
    """Roles; a turn of calls is followed by a turn of as many responses."""
    calls: list[str] = []
    for number, content in enumerate(contents):
        where = f"contents[{number}]"
        known(content, {"role", "parts"}, where)
        if content.get("role", "user") not in ("user", "model", "function"):
            raise Refused(400, "Please use a valid role: user, model.")
        if not content.get("parts"):
            raise Refused(400, f"* GenerateContentRequest.{where}.parts: contents.parts must not be empty.")
        for index, part in enumerate(content["parts"]):
            check_part(part, f"{where}.parts[{index}]")
        parts = content["parts"]
        responses = [part["functionResponse"] for part in parts if "functionResponse" in part]
        if len(responses) != len(calls) or sorted(r.get("name") for r in responses) != sorted(calls):
            message = "Please ensure that the number of function response parts is equal to the number of function call parts of the function call turn."
            raise Refused(400, message)
        called = [part for part in parts if "functionCall" in part]
        calls = [part["functionCall"].get("name") for part in called]
        if called and (number == 0 or contents[number - 1].get("role", "user") == "model"):
            message = "Please ensure that function call turn comes immediately after a user turn or after a function response turn."
            raise Refused(400, message)
        if called and strict and called[0].get("thoughtSignature") not in (SIGNATURE, *DUMMIES):
            raise Refused(
                400,
                f"Function call is missing a thought_signature in functionCall parts: {calls[0]}, position {number + 1}.",
            )
        text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
        ask.texts.append(text)
        if content.get("role", "user") != "model":
            images = [part["inlineData"]["mimeType"] for part in parts if "inlineData" in part]
            ask.results = [result_text(response) for response in responses] if not text else []
            ask.user, ask.images = text, images
            ask.texts.extend(ask.results)
    if calls:
        raise Refused(400, "Please ensure that function call turn is followed by a function response turn.")
    if contents[-1].get("role") == "model":
        raise Refused(400, "Please ensure that the last turn is a user turn.")


def refuse_ids(contents: list) -> None:
    """Vertex AI knows calls by their functions' names alone."""
    for number, content in enumerate(contents):
        for index, part in enumerate(content["parts"]):
            for name in ("functionCall", "functionResponse"):
                if "id" in part.get(name, {}):
                    where = f"contents[{number}].parts[{index}]"
                    raise Refused(
                        400,
                        f"Invalid JSON payload received. Unknown name \"id\" at '{where}.{name}': Cannot find field.",
                    )


def check_part(part: dict, where: str) -> None:
    known(part, DATA | {"thought", "thoughtSignature", "videoMetadata", "partMetadata"}, where)
    if len(DATA & set(part)) != 1:
        raise Refused(
            400, f"* GenerateContentRequest.{where}.data: required oneof field 'data' must have one initialized field"
        )
    if "functionCall" in part:
        known(part["functionCall"], {"id", "name", "args"}, f"{where}.function_call")
        if not isinstance(part["functionCall"].get("args", {}), dict):
            raise Refused(
                400, f"Invalid value at '{where}.function_call.args' (type.googleapis.com/google.protobuf.Struct)"
            )
    if "functionResponse" in part:
        known(
            part["functionResponse"],
            {"id", "name", "response", "willContinue", "scheduling", "parts"},
            f"{where}.function_response",
        )
        if not part["functionResponse"].get("name"):
            raise Refused(400, f"* GenerateContentRequest.{where}.function_response.name: Name cannot be empty.")
        if not isinstance(part["functionResponse"].get("response"), dict):
            raise Refused(
                400,
                f"Invalid value at '{where}.function_response.response' (type.googleapis.com/google.protobuf.Struct)",
            )
    if "inlineData" in part:
        known(part["inlineData"], {"mimeType", "data", "displayName"}, f"{where}.inline_data")
        if not part["inlineData"].get("mimeType"):
            raise Refused(400, f"* GenerateContentRequest.{where}.inline_data.mime_type: must not be empty")
    for value in (part.get("thoughtSignature"), (part.get("inlineData") or {}).get("data")):
        try:
            # Proto JSON takes both alphabets, padded or not.
            text = (value or "").rstrip("=").translate({ord("-"): "+", ord("_"): "/"})
            base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except ValueError:
            raise Refused(400, f"Invalid value at '{where}' (TYPE_BYTES), Base64 decoding failed") from None


def result_text(response: dict) -> str:
    """What a function said: under its one key, if it has only one."""
    values = list(response["response"].values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(response["response"])


def embedded(request: dict) -> list[float]:
    known(request, {"model", "content", "taskType", "title", "outputDimensionality"}, "")
    text = "".join(part["text"] for part in request["content"]["parts"])
    if not text:
        raise Refused(400, "* EmbedContentRequest.content: content is empty")
    return vector(text, request.get("outputDimensionality") or 8)


def chunks_of(answer: Answer, model: str, whole: bool) -> list[dict]:
    """The whole answer, or what a stream says: each chunk is a response with a piece of the candidate."""
    thoughts = [{"text": text, "thought": True} for text in pieces(answer.thinking)]
    texts = [{"text": text} for text in pieces(answer.text)]
    calls = [{"functionCall": {"name": name, "args": arguments}} for name, arguments in answer.calls]
    # Only the first of parallel calls carries the signature.
    for part in calls[:1]:
        part["thoughtSignature"] = SIGNATURE
    usage = {
        "promptTokenCount": answer.input_tokens,
        "candidatesTokenCount": answer.output_tokens - answer.thinking_tokens,
    }
    usage["totalTokenCount"] = answer.input_tokens + answer.output_tokens
    if answer.thinking_tokens:
        usage["thoughtsTokenCount"] = answer.thinking_tokens
    if whole:
        thoughts = [{"text": answer.thinking, "thought": True}] if thoughts else []
        texts = [{"text": answer.text}] if texts else []
    parts = thoughts + texts + calls
    groups = [parts] if whole else [[part] for part in parts] or [[{"text": ""}]]
    chunks = []
    for number, group in enumerate(groups):
        candidate = {"content": {"parts": group, "role": "model"}, "index": 0}
        if number == len(groups) - 1:
            candidate["finishReason"] = FINISH[answer.finish]
            if answer.finish == "refusal":
                candidate.pop("content")
        chunk = {
            "candidates": [candidate],
            "usageMetadata": usage,
            "modelVersion": model,
            "responseId": "mock-response",
        }
        chunks.append(chunk)
    return chunks
