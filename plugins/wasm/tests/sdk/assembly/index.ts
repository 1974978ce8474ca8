// A plugin built with a public kit (AssemblyScript, @solo-io/proxy-runtime), as somebody would build one for Envoy. What it does:
//
//   headers       adds x-plugin to requests and x-plugin-answers (a count in shared data) to answers
//   x-deny        a request with this header is answered 403 by the plugin
//   x-check       a request with this header waits until the upstream "auth" has said 200
//   body          "secret" in requests becomes "******"; "hello" in answers becomes "HELLO"
//   log           one line per request, with its id and its tokens
//   timer         every 20 ms: counts a metric and shared data
//
// The kit's functions for shared data and for writing bodies do not match the ABI (it passes pointers where values belong), so those
// two are declared here.

export * from "../node_modules/@solo-io/proxy-runtime/assembly/proxy";
import {
  BaseContext, Context, FilterDataStatusValues, FilterHeadersStatusValues, GrpcStatusValues, HeaderPair, LogLevelValues,
  RootContext, continue_request, log, registerRootContext, send_local_response, stream_context,
} from "../node_modules/@solo-io/proxy-runtime/assembly";
import {
  BufferTypeValues, Counter, MetricTypeValues, get_buffer_bytes, get_property, set_tick_period_milliseconds,
} from "../node_modules/@solo-io/proxy-runtime/assembly/runtime";

// @ts-ignore: decorator
@external("env", "proxy_get_shared_data")
declare function get_shared(key: usize, size: usize, value: usize, valueSize: usize, cas: usize): u32;
// @ts-ignore: decorator
@external("env", "proxy_set_shared_data")
declare function set_shared(key: usize, size: usize, value: usize, valueSize: usize, cas: u32): u32;
// @ts-ignore: decorator
@external("env", "proxy_set_buffer_bytes")
declare function set_buffer(kind: u32, start: u32, size: u32, value: usize, valueSize: usize): u32;

const CAS_MISMATCH: u32 = 8;

class Found {
  pointer: usize = 0;
  size: usize = 0;
  cas: u32 = 0;
}

let found = new Found();

// Adds one to a number in shared data, against whoever else does so; the new number.
function count(name: string): u32 {
  let key = String.UTF8.encode(name);
  while (true) {
    let at = changetype<usize>(found);
    let status = get_shared(
      changetype<usize>(key), key.byteLength,
      at + offsetof<Found>("pointer"), at + offsetof<Found>("size"), at + offsetof<Found>("cas"));
    let next: u32 = 1;
    let cas: u32 = 0;
    if (status == 0) {
      next = load<u32>(found.pointer) + 1;
      cas = found.cas;
    }
    let value = new ArrayBuffer(4);
    store<u32>(changetype<usize>(value), next);
    if (set_shared(changetype<usize>(key), key.byteLength, changetype<usize>(value), 4, cas) != CAS_MISMATCH) {
      return next;
    }
  }
}

// Puts `to` in the place of every `from`, which is as long.
function replaceAll(kind: u32, size: usize, from: string, to: string): void {
  let body = String.UTF8.decode(get_buffer_bytes(kind, 0, size as u32));
  let changed = body.split(from).join(to);
  if (changed != body) {
    let bytes = String.UTF8.encode(changed);
    set_buffer(kind, 0, size as u32, changetype<usize>(bytes), bytes.byteLength);
  }
}

function pair(name: string, value: string): HeaderPair {
  return new HeaderPair(String.UTF8.encode(name), String.UTF8.encode(value));
}

class Root extends RootContext {
  configuration: string = "";
  ticks: Counter = new Counter("ticks");

  // The kit's own reads the configuration's size into the configuration.
  onConfigure(size: u32): bool {
    this.configuration = String.UTF8.decode(get_buffer_bytes(BufferTypeValues.PluginConfiguration, 0, size));
    if (this.configuration == "wrong") {
      log(LogLevelValues.error, "wrong is no configuration");
      return false;
    }
    set_tick_period_milliseconds(20);
    return true;
  }

  onTick(): void {
    this.ticks.increment(1);
    count("ticks");
  }

  createContext(context_id: u32): Context {
    return new Stream(context_id, this);
  }
}

class Stream extends Context {
  constructor(context_id: u32, root_context: RootContext) {
    super(context_id, root_context);
  }

  onRequestHeaders(headers: u32, end: bool): FilterHeadersStatusValues {
    stream_context.headers.request.add("x-plugin", (this.root_context as Root).configuration);
    if (stream_context.headers.request.get("x-deny") != "") {
      let body = String.UTF8.encode("{\"error\":{\"message\":\"denied by the plugin\"}}");
      send_local_response(403, "denied", body, [pair("x-denied", "yes")], GrpcStatusValues.PermissionDenied);
      return FilterHeadersStatusValues.StopIteration;
    }
    let check = stream_context.headers.request.get("x-check");
    if (check == "") {
      return FilterHeadersStatusValues.Continue;
    }
    let asked = this.root_context.httpCall(
      "auth", [pair(":method", "GET"), pair(":path", "/check"), pair(":authority", "auth"), pair("x-check", check)],
      new ArrayBuffer(0), [], 1000, this,
      (origin: BaseContext, headers: u32, size: usize, trailers: u32): void => {
        let status = stream_context.headers.http_callback.get(":status");
        if (status == "200") {
          stream_context.headers.request.add("x-checked", "yes");
          continue_request();
        } else {
          send_local_response(401, "not checked", String.UTF8.encode("{\"error\":{\"message\":\"not checked\"}}"), [], GrpcStatusValues.Unauthenticated);
        }
      });
    return asked == 0 ? FilterHeadersStatusValues.StopIteration : FilterHeadersStatusValues.Continue;
  }

  onRequestBody(size: usize, end: bool): FilterDataStatusValues {
    replaceAll(BufferTypeValues.HttpRequestBody, size, "secret", "******");
    return FilterDataStatusValues.Continue;
  }

  onResponseHeaders(headers: u32, end: bool): FilterHeadersStatusValues {
    stream_context.headers.response.add("x-plugin-answers", count("answers").toString());
    return FilterHeadersStatusValues.Continue;
  }

  onResponseBody(size: usize, end: bool): FilterDataStatusValues {
    replaceAll(BufferTypeValues.HttpResponseBody, size, "hello", "HELLO");
    return FilterDataStatusValues.Continue;
  }

  onLog(): void {
    let id = String.UTF8.decode(get_property("request\0id"));
    let tokens = load<i64>(changetype<usize>(get_property("penstock\0completion_tokens")));
    log(LogLevelValues.info, "request " + id + " used " + tokens.toString() + " completion tokens");
    count("logged");
  }
}

registerRootContext((context_id: u32) => new Root(context_id), "");
