"""Bedrock's Converse as published: converse and converse-stream, with Signature Version 4 checked and answers as an event stream.

References: docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_Converse.html, _ConverseStream.html;
docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html; the event stream encoding of the AWS SDKs.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import struct
import zlib
from datetime import UTC, datetime
from urllib.parse import quote, unquote

from providers.anthropic import closed_schema
from providers.brain import Answer, Ask, pieces, split_json, think
from providers.server import Provider, Refused, Reply, Seen, Stream, parse

FIELDS = set(
    "messages system inferenceConfig toolConfig guardrailConfig additionalModelRequestFields promptVariables "
    "additionalModelResponseFieldPaths requestMetadata performanceConfig serviceTier outputConfig".split()
)
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
STOPS = {"stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {
    400: "ValidationException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    408: "ModelTimeoutException",
    424: "ModelErrorException",
    429: "ThrottlingException",
    500: "InternalServerException",
    503: "ServiceUnavailableException",
}


class Bedrock(Provider):
    access_key = "AKIDMOCKUPSTREAM"
    key = "sk-upstream-bedrock-secret"
    # Required in the request when it is set.
    session_token: str | None = None
    region = "eu-test-1"
    models = ("mock-model", "anthropic.mock-v1:0")

    def check_key(self, seen: Seen) -> None:
        fault = signature_fault(seen, self.access_key, self.key, self.region, self.session_token)
        if fault:
            raise Refused(403, fault)

    def error(self, refused: Refused) -> Reply:
        kind = refused.kind or KINDS.get(refused.status, "InternalServerException")
        return Reply(
            {"message": refused.message}, refused.status, {"x-amzn-errortype": f"{kind}:http://internal.amazon.com/"}
        )

    def answer(self, seen: Seen) -> Reply | Stream:
        match = re.fullmatch(r"/model/([^/]+)/(converse|converse-stream)", seen.path)
        if seen.method != "POST" or not match:
            raise Refused(404, "UnknownOperationException", "UnknownOperationException")
        if unquote(match[1]) not in self.models:
            raise Refused(400, "The provided model identifier is invalid.")
        answer = think(read(parse(seen)))
        return stream_of(answer) if match[2] == "converse-stream" else Reply(whole_of(answer))


def signature_fault(seen: Seen, access_key: str, secret: str, region: str, token: str | None) -> str | None:
    """What is wrong with the signature; the canonical request is built from what came, not from what should have."""
    pattern = r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})"
    match = re.fullmatch(pattern, seen.headers.get("authorization", ""))
    if not match:
        return "Authorization header requires 'Credential', 'SignedHeaders' and 'Signature' parameters."
    given_key, day, given_region, service, signed, signature = match.groups()
    date = seen.headers.get("x-amz-date", "")
    if given_key != access_key or given_region != region or service != "bedrock":
        return "The security token included in the request is invalid."
    if token is not None and (
        seen.headers.get("x-amz-security-token") != token or "x-amz-security-token" not in signed.split(";")
    ):
        return "The security token included in the request is invalid."
    if "host" not in signed.split(";") or "x-amz-date" not in signed.split(";") or not date.startswith(day):
        return "'Host' and 'X-Amz-Date' must be signed."
    try:
        age = abs((datetime.now(UTC) - datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)).total_seconds())
    except ValueError:
        return "Date must be in ISO-8601 'basic format'."
    if age > 300:
        return f"Signature expired: {date}"
    query = "&".join(
        f"{quote(n, safe='-_.~')}={quote(v, safe='-_.~')}" for n in sorted(seen.query) for v in sorted(seen.query[n])
    )
    headers = "".join(f"{name}:{' '.join(seen.headers.get(name, '').split())}\n" for name in signed.split(";"))
    # The path as it was sent, encoded once more: every service but S3.
    path = quote(seen.path, safe="/-_.~")
    digest = hashlib.sha256(seen.raw).hexdigest()
    canonical = "\n".join([seen.method, path, query, headers, signed, digest])
    scope = f"{day}/{region}/bedrock/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret}".encode()
    for part in (day, region, "bedrock", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    wanted = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(wanted, signature):
        return "The request signature we calculated does not match the signature you provided."
    return None


def invalid(message: str) -> Refused:
    return Refused(400, message)


def one_of(block: dict, kinds: set[str], where: str) -> str:
    """The member of a union that is set."""
    if len(block) != 1 or next(iter(block)) not in kinds:
        raise invalid(f"The value at {where} must set exactly one of the following keys: {', '.join(sorted(kinds))}.")
    return next(iter(block))


def known(value: dict, fields: set[str], where: str) -> None:
    for name in value:
        if name not in fields:
            raise invalid(
                f"Malformed input request: extraneous key [{name}] is not permitted at {where or 'the request'}."
            )


def read(body: dict) -> Ask:
    """Checks a request and reads it."""
    known(body, FIELDS, "")
    config = body.get("inferenceConfig") or {}
    known(config, {"maxTokens", "temperature", "topP", "stopSequences"}, "inferenceConfig")
    if config.get("maxTokens") is not None and config["maxTokens"] < 1:
        raise invalid(
            "Value at 'inferenceConfig.maxTokens' failed to satisfy constraint: Member must have value greater than or equal to 1"
        )
    for name in ("temperature", "topP"):
        if config.get(name) is not None and not 0 <= config[name] <= 1:
            raise invalid(
                f"Value at 'inferenceConfig.{name}' failed to satisfy constraint: Member must have value less than or equal to 1"
            )
    if len(config.get("stopSequences") or []) > 2500:
        raise invalid("Value at 'inferenceConfig.stopSequences' is too long.")
    ask = Ask(max_tokens=config.get("maxTokens"), stop=config.get("stopSequences") or [])
    extra = body.get("additionalModelRequestFields") or {}
    known(
        extra,
        {"thinking", "top_k", "reasoning_config", "anthropic_beta", "inferenceConfig"},
        "additionalModelRequestFields",
    )
    ask.json = ((body.get("outputConfig") or {}).get("textFormat") or {}).get("type") == "json_schema"
    ask.thinking = any((extra.get(name) or {}).get("type") == "enabled" for name in ("thinking", "reasoning_config"))
    form = (body.get("outputConfig") or {}).get("textFormat") or {}
    if form and (form.get("type") != "json_schema" or "schema" not in form["structure"]["jsonSchema"]):
        raise invalid("The value at outputConfig.textFormat is invalid.")
    if form:
        closed_schema(json.loads(form["structure"]["jsonSchema"]["schema"]), "output_config.format.schema")
    ask.json = bool(form)
    for number, block in enumerate(body.get("system") or []):
        if one_of(block, {"text", "cachePoint", "guardContent"}, f"system.{number}") == "text":
            ask.system += filled(block["text"], f"system.{number}")
    ask.texts.append(ask.system)
    read_tools(body.get("toolConfig"), ask)
    read_messages(body, ask)
    return ask


def filled(text: str, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise invalid(
            f"The text field in the ContentBlock object at {where} is blank. Add text to the text field, and try again."
        )
    return text


def read_tools(config: dict | None, ask: Ask) -> None:
    if config is None:
        return
    known(config, {"tools", "toolChoice"}, "toolConfig")
    if not config.get("tools"):
        raise invalid(
            "Value at 'toolConfig.tools' failed to satisfy constraint: Member must have length greater than or equal to 1"
        )
    for number, tool in enumerate(config["tools"]):
        if one_of(tool, {"toolSpec", "cachePoint", "systemTool"}, f"toolConfig.tools.{number}") != "toolSpec":
            continue
        spec = tool["toolSpec"]
        known(spec, {"name", "description", "inputSchema", "strict"}, f"toolConfig.tools.{number}.toolSpec")
        if not NAME.fullmatch(spec.get("name") or ""):
            raise invalid(
                f"Value at 'toolConfig.tools.{number}.member.toolSpec.name' failed to satisfy constraint: [a-zA-Z0-9_-]+"
            )
        if spec.get("description") == "":
            raise invalid("description: Member must have length greater than or equal to 1")
        if (
            not isinstance((spec.get("inputSchema") or {}).get("json"), dict)
            or spec["inputSchema"]["json"].get("type") != "object"
        ):
            raise invalid(
                f"The value at toolConfig.tools.{number}.toolSpec.inputSchema.json.type must be one of the following: object."
            )
        if spec.get("strict"):
            closed_schema(spec["inputSchema"]["json"], f"tools.{number}.custom.input_schema")
        ask.tools.append(spec["name"])
    choice = config.get("toolChoice")
    if choice is not None:
        kind = one_of(choice, {"auto", "any", "tool"}, "toolConfig.toolChoice")
        ask.choice = {"auto": "auto", "any": "required"}.get(kind) or f"name:{choice['tool']['name']}"


def read_messages(body: dict, ask: Ask) -> None:
    messages = body.get("messages")
    if not messages:
        raise invalid("The request must have at least one message.")
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        known(message, {"role", "content"}, where)
        if message.get("role") != ("user", "assistant")[number % 2]:
            if number == 0:
                raise invalid(
                    "A conversation must start with a user message. Try again with a conversation that starts with a user message."
                )
            raise invalid(
                "A conversation must alternate between user and assistant roles. Make sure the conversation alternates between user and assistant roles and try again."
            )
        if not message.get("content"):
            raise invalid(
                f"The content field in the Message object at {where} is empty. Add a ContentBlock object to the content field and try again."
            )
        texts, images, results, calls, answered = [], [], [], [], []
        for index, block in enumerate(message["content"]):
            here = f"{where}.content.{index}"
            kinds = {
                "text",
                "image",
                "document",
                "toolUse",
                "toolResult",
                "reasoningContent",
                "cachePoint",
                "guardContent",
                "video",
            }
            kind = one_of(block, kinds, here)
            if kind == "text":
                texts.append(filled(block["text"], here))
            elif kind == "image":
                images.append(image_type(block["image"], here))
            elif kind == "toolUse":
                calls.append(checked_use(block["toolUse"], here))
            elif kind == "toolResult":
                answered.append(block["toolResult"]["toolUseId"])
                results.append(result_text(block["toolResult"], here))
        if (calls or answered) and not ask.tools:
            raise invalid("The toolConfig field must be defined when using toolUse and toolResult content blocks.")
        if sorted(answered) != sorted(open_calls):
            if len(answered) > len(open_calls):
                raise invalid(
                    f"The number of toolResult blocks at {where}.content exceeds the number of toolUse blocks of previous turn."
                )
            raise invalid(
                f"Expected toolResult blocks at {where}.content for the following Ids: {', '.join(open_calls)}"
            )
        open_calls = calls
        ask.texts.extend(texts + results)
        if message["role"] == "user":
            ask.user, ask.images, ask.results = "".join(texts), images, [] if texts else results
    if messages[-1]["role"] != "user":
        raise invalid(
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )


def checked_use(use: dict, where: str) -> str:
    known(use, {"toolUseId", "name", "input", "type"}, where)
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", use.get("toolUseId") or "") or not NAME.fullmatch(
        use.get("name") or ""
    ):
        raise invalid(f"Value at '{where}.member.toolUse' failed to satisfy constraint: [a-zA-Z0-9_-]+")
    if not isinstance(use.get("input"), dict):
        raise invalid(
            f"The format of the value at {where}.toolUse.input is invalid. Provide a json object for the field and try again."
        )
    return use["toolUseId"]


def result_text(result: dict, where: str) -> str:
    known(result, {"toolUseId", "content", "status", "type"}, where)
    texts = []
    for block in result.get("content") or []:
        kind = one_of(block, {"text", "json", "image", "document", "video"}, where)
        texts.append(block["text"] if kind == "text" else json.dumps(block[kind]) if kind == "json" else f"[{kind}]")
    return ("error: " if result.get("status") == "error" else "") + "".join(texts)


def image_type(image: dict, where: str) -> str:
    if image.get("format") not in ("png", "jpeg", "gif", "webp") or "bytes" not in (image.get("source") or {}):
        raise invalid(f"The value at {where}.image.format is invalid.")
    base64.b64decode(image["source"]["bytes"], validate=True)
    return f"image/{image['format']}"


def blocks_of(answer: Answer) -> list[dict]:
    blocks = []
    if answer.thinking:
        text = {"text": answer.thinking, "signature": base64.b64encode(b"mock reasoning").decode()}
        blocks.append({"reasoningContent": {"reasoningText": text}})
    if answer.text:
        blocks.append({"text": answer.text})
    for number, (name, arguments) in enumerate(answer.calls):
        blocks.append({"toolUse": {"toolUseId": f"tooluse_mock{number}", "name": name, "input": arguments}})
    return blocks


def usage_of(answer: Answer) -> dict:
    total = answer.input_tokens + answer.output_tokens
    return {"inputTokens": answer.input_tokens, "outputTokens": answer.output_tokens, "totalTokens": total}


def stop_of(answer: Answer) -> str:
    return "content_filtered" if answer.finish == "refusal" else STOPS[answer.finish]


def whole_of(answer: Answer) -> dict:
    message = {"role": "assistant", "content": blocks_of(answer)}
    return {
        "output": {"message": message},
        "stopReason": stop_of(answer),
        "usage": usage_of(answer),
        "metrics": {"latencyMs": 5},
    }


def stream_of(answer: Answer) -> Stream:
    events = []

    def say(kind, **fields):
        events.append(
            frame({":event-type": kind, ":content-type": "application/json", ":message-type": "event"}, fields)
        )

    say("messageStart", role="assistant", p="abcdef")
    for index, block in enumerate(blocks_of(answer)):
        if use := block.get("toolUse"):
            say(
                "contentBlockStart",
                contentBlockIndex=index,
                start={"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}},
            )
            deltas = [{"toolUse": {"input": piece}} for piece in split_json(json.dumps(use["input"]))]
        elif reasoning := block.get("reasoningContent"):
            text = reasoning["reasoningText"]
            deltas = [{"reasoningContent": {"text": piece}} for piece in pieces(text["text"])]
            deltas.append({"reasoningContent": {"signature": text["signature"]}})
        else:
            deltas = [{"text": piece} for piece in pieces(block["text"])]
        for delta in deltas:
            say("contentBlockDelta", contentBlockIndex=index, delta=delta, p="abcd")
        say("contentBlockStop", contentBlockIndex=index)
    say("messageStop", stopReason=stop_of(answer))
    say("metadata", usage=usage_of(answer), metrics={"latencyMs": 5})
    headers = {
        ":exception-type": "modelStreamErrorException",
        ":content-type": "application/json",
        ":message-type": "exception",
    }
    error = frame(headers, {"message": "The model failed.", "originalStatusCode": 500})
    return Stream(events, error, closing=2, content_type="application/vnd.amazon.eventstream")


def frame(headers: dict[str, str], payload: dict) -> bytes:
    """One message of the event stream: lengths, their CRC, headers (all strings), payload, CRC."""
    coded = b""
    for name, value in headers.items():
        coded += bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
    body = json.dumps(payload, ensure_ascii=False).encode()
    prelude = struct.pack(">II", 16 + len(coded) + len(body), len(coded))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + coded + body
    return message + struct.pack(">I", zlib.crc32(message))
