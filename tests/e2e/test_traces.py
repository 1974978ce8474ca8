"""Traces reach an OpenTelemetry collector, go on with the client's, and say nothing that a prompt, an answer or a key said."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from harness import serving, user, wait_until
from providers import OpenAi

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SECRETS = ["pk-client-planted", "sk-provider-planted", "collector-planted", "planted-prompt", "Error-planted"]
CONFIG = """
[telemetry]
otlp_url = "{collector}"
otlp_headers_env = "COLLECTOR"

[[keys]]
id = "client"
key_env = "KEY_CLIENT"
routes = ["/v1/*", "/metrics"]

[[pools]]
id = "own"

[[providers]]
id = "first"
base_url = "{mock}/v1"
key_env = "KEY_PROVIDER"

[[models]]
name = "chain"
to = [{{ provider = "first", model = "mock-model" }}]
fallback = [{{ pool = "own" }}]
retries = 0
"""


class Collector(ThreadingHTTPServer):
    """Takes traces, as a collector does."""

    daemon_threads = True

    def __init__(self):
        self.bodies: list[bytes] = []
        self.fields: list[dict] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                collector.fields.append(dict(self.headers))
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list:
        found = []
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found.extend(scope.spans)
        return found

    def trace(self, trace_id: str, count: int) -> dict:
        """The spans of one trace by name, once there are that many."""

        def there():
            spans = [span for span in self.spans() if span.trace_id.hex() == trace_id]
            return spans if len(spans) >= count else None

        return {span.name: span for span in wait_until(there, f"{count} spans of {trace_id}")}


def said(span) -> dict:
    """Attributes of a span."""

    def value(any_value):
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [item.string_value for item in any_value.array_value.values]
        return getattr(any_value, kind)

    return {pair.key: value(pair.value) for pair in span.attributes}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    collector = Collector()
    with OpenAi() as mock:
        mock.key = "sk-provider-planted"
        config = CONFIG.format(collector=collector.url, mock=mock.url)
        env = {
            "KEY_CLIENT": "pk-client-planted",
            "KEY_PROVIDER": mock.key,
            "COLLECTOR": "authorization=Bearer collector-planted",
        }
        with serving(tmp_path_factory.mktemp("traces"), workers=1, config=config, env=env) as gateway:
            yield gateway, collector, mock
    collector.shutdown()


def metric(gateway, name: str) -> float:
    headers = {"authorization": "Bearer pk-client-planted"}
    text = httpx.get(f"{gateway.url}/metrics", headers=headers, timeout=30).text
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


def ask(gateway, model: str, trace: str = TRACE, flags: str = "01", **more):
    headers = {
        "authorization": "Bearer pk-client-planted",
        "traceparent": f"00-{trace}-{PARENT}-{flags}",
        "tracestate": "vendor=1",
    }
    body = {"model": model, "messages": user("Hello planted-prompt"), "max_tokens": 50} | more
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_goes_through_the_gateway_to_the_provider(world, stream):
    gateway, collector, mock = world
    trace = f"{TRACE[:-1]}{int(stream)}"
    reply = ask(gateway, "chain", trace, stream=stream)
    assert reply.status_code == 200, (reply.text, mock.seen)
    spans = collector.trace(trace, 2)
    root, call = spans["chat chain"], spans["chat mock-model"]
    assert (root.parent_span_id.hex(), call.parent_span_id) == (PARENT, root.span_id)
    assert (root.kind, call.kind) == (2, 3), "a server's, a client's"
    assert root.start_time_unix_nano <= call.start_time_unix_nano <= call.end_time_unix_nano <= root.end_time_unix_nano
    outgoing = {name.lower(): value for name, value in mock.last.headers.items()}
    assert outgoing["traceparent"] == f"00-{trace}-{call.span_id.hex()}-01"
    assert outgoing["tracestate"] == "vendor=1"
    facts = said(root)
    assert facts["gen_ai.request.model"] == "chain" and facts["penstock.key"] == "client"
    assert facts["gen_ai.response.finish_reasons"] == ["stop"] and facts["gen_ai.usage.output_tokens"] > 0
    assert said(call)["gen_ai.provider.name"] == "openai" and said(call)["penstock.outcome"] == "complete"


def test_every_attempt_is_a_span_and_so_is_the_worker(world):
    gateway, collector, mock = world
    trace = "1" * 32
    mock.fail(status=503, message="Error-planted planted-prompt")
    assert ask(gateway, "chain", trace).status_code == 200
    spans = collector.trace(trace, 3)
    failed, pool = spans["chat mock-model"], spans["pool own"]
    assert failed.status.code == 2 and said(failed)["http.response.status_code"] == 503
    assert said(pool)["penstock.worker"].startswith("own-0") and said(pool)["gen_ai.usage.output_tokens"] >= 1
    assert pool.start_time_unix_nano >= failed.end_time_unix_nano
    assert "penstock.queue_ms" in said(pool) and spans["chat chain"].status.code == 0


def test_a_client_that_does_not_record_is_not_recorded_but_carried_on(world):
    gateway, collector, mock = world
    quiet, loud = "2" * 32, "3" * 32
    assert ask(gateway, "chain", quiet, flags="00").status_code == 200
    outgoing = {name.lower(): value for name, value in mock.last.headers.items()}
    assert outgoing["traceparent"].startswith(f"00-{quiet}-") and outgoing["traceparent"].endswith("-00")
    assert ask(gateway, "chain", loud).status_code == 200
    collector.trace(loud, 2)
    assert not [span for span in collector.spans() if span.trace_id.hex() == quiet]


def test_refusals_are_traced_too(world):
    gateway, collector, _ = world
    trace = "4" * 32
    assert ask(gateway, "no-such-model", trace).status_code == 404
    root = collector.trace(trace, 1)["POST /v1/chat/completions"]
    assert said(root)["http.response.status_code"] == 404 and said(root)["error.type"] == "ModelNotFound"


def test_nothing_secret_is_in_a_trace(world):
    gateway, collector, _ = world
    assert ask(gateway, "chain", "5" * 32).status_code == 200
    collector.trace("5" * 32, 2)
    everything = b"".join(collector.bodies)
    assert len(everything) > 500
    for secret in SECRETS:
        assert secret.encode() not in everything, secret
    assert collector.fields[0]["authorization"] == "Bearer collector-planted"
    assert metric(gateway, "penstock_spans_sent_total") >= 2


def test_a_collector_that_is_away_delays_nobody(world, tmp_path):
    _, _, mock = world
    config = CONFIG.format(collector="http://127.0.0.1:9", mock=mock.url).replace('[[pools]]\nid = "own"\n', "")
    config = config.replace('fallback = [{ pool = "own" }]\n', "")
    env = {"KEY_CLIENT": "pk-client-planted", "KEY_PROVIDER": mock.key, "COLLECTOR": "x-a=b"}
    with serving(tmp_path, workers=0, config=config, env=env) as gateway:
        assert ask(gateway, "chain").status_code == 200
        wait_until(lambda: metric(gateway, "penstock_spans_lost_total") >= 2, "the spans are counted as lost")
        assert "took no traces" in gateway.log()
