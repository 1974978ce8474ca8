//! Host functions as a plugin sees them.

use crate::support;

use penstock_wasm::host::{Action, CallAnswer, Fields, ROOT};
use support::Item::{Number, Text};
use support::{Item, expected, module, noted, start, stream};

const OK: Item = Number(0);
const NOT_FOUND: Item = Number(1);
const BAD_ARGUMENT: Item = Number(2);
const PARSE_FAILURE: Item = Number(4);
const INVALID_MEMORY: Item = Number(6);
const EMPTY: Item = Number(7);
const CAS_MISMATCH: Item = Number(8);
const UNIMPLEMENTED: Item = Number(12);

#[track_caller]
fn check(data: &str, code: &str, items: &[Item]) {
    assert_eq!(
        String::from_utf8_lossy(&noted(data, code)).escape_debug().to_string(),
        String::from_utf8_lossy(&expected(items)).escape_debug().to_string()
    );
}

/// `(call $report (call $NAME constants…))`
fn report(name: &str, arguments: &[i64]) -> String {
    let parameters = support::FUNCTIONS.iter().chain(support::WASI).find(|(own, _)| *own == name).unwrap().1;
    assert_eq!(parameters.len(), arguments.len(), "{name}");
    let constants: Vec<_> = parameters
        .chars()
        .zip(arguments)
        .map(|(kind, value)| format!("({}.const {value})", if kind == 'l' { "i64" } else { "i32" }))
        .collect();
    format!("(call $report (call ${name} {}))\n", constants.join(" "))
}

const OUT: i64 = 16;
const OUT_SIZE: i64 = 20;
const TOLD: &str = "(call $told_bytes (i32.const 16))";

#[test]
fn headers_are_read() {
    let data = r#"(data (i32.const 1024) "X-A:pathx-none")"#;
    let get = |name, size| report("proxy_get_header_map_value", &[0, name, size, OUT, OUT_SIZE]);
    let code = [get(1024, 3), TOLD.into(), get(1027, 5), TOLD.into(), get(1032, 6)].concat();
    check(data, &code, &[OK, Text(b"1,2"), OK, Text(b"/v1/chat/completions"), NOT_FOUND]);
}

#[test]
fn headers_are_changed() {
    let data = r#"(data (i32.const 1024) "x-bthree:path\0avalue")"#;
    let code = [
        report("proxy_add_header_map_value", &[0, 1024, 3, 1027, 5]),
        report("proxy_get_header_map_value", &[0, 1024, 3, OUT, OUT_SIZE]),
        TOLD.into(),
        report("proxy_replace_header_map_value", &[0, 1024, 3, 1032, 5]),
        report("proxy_get_header_map_value", &[0, 1024, 3, OUT, OUT_SIZE]),
        TOLD.into(),
        report("proxy_remove_header_map_value", &[0, 1024, 3]),
        report("proxy_get_header_map_value", &[0, 1024, 3, OUT, OUT_SIZE]),
        // A pseudo header is a fact; a name with a line's end would be two headers.
        report("proxy_replace_header_map_value", &[0, 1032, 5, 1027, 5]),
        report("proxy_add_header_map_value", &[0, 1036, 3, 1027, 5]),
        // The answer's are not there yet; gRPC's never.
        report("proxy_add_header_map_value", &[2, 1024, 3, 1027, 5]),
        report("proxy_get_header_map_value", &[4, 1024, 3, OUT, OUT_SIZE]),
        report("proxy_get_header_map_value", &[9, 1024, 3, OUT, OUT_SIZE]),
    ];
    let items = [
        OK,
        OK,
        Text(b"three"),
        OK,
        OK,
        Text(b":path"),
        OK,
        NOT_FOUND,
        BAD_ARGUMENT,
        BAD_ARGUMENT,
        BAD_ARGUMENT,
        NOT_FOUND,
        BAD_ARGUMENT,
    ];
    check(data, &code.concat(), &items);
}

#[test]
fn all_headers_cross_at_once() {
    let data = r#"(data (i32.const 1024) "\01\00\00\00\01\00\00\00\01\00\00\00b\003\00") (data (i32.const 2048) "\ff\00\00\00")"#;
    let code = [
        report("proxy_get_header_map_size", &[0, OUT]),
        "(call $report (i32.load (i32.const 16)))".into(),
        report("proxy_set_header_map_pairs", &[0, 1024, 16]),
        report("proxy_get_header_map_pairs", &[0, OUT, OUT_SIZE]),
        "(call $report (i32.load (i32.load (i32.const 16))))".into(),
        report("proxy_set_header_map_pairs", &[0, 2048, 4]),
        report("proxy_get_header_map_pairs", &[2, OUT, OUT_SIZE]),
        "(call $report (i32.load (i32.const 16))) (call $report (i32.load (i32.const 20)))".into(),
    ];
    let size = 4 + 4 * 10 + (":methodPOST:path/v1/chat/completionsx-a1x-a2".len() as u32);
    // The two pseudo headers stay though the new list has none.
    check(data, &code.concat(), &[OK, Number(size), OK, OK, Number(3), PARSE_FAILURE, OK, Number(0), Number(0)]);
}

#[test]
fn pointers_that_lead_nowhere_are_told() {
    let far = 2 * 65536;
    let code = [
        report("proxy_log", &[2, far, 1]),
        report("proxy_log", &[2, -1, -1]),
        report("proxy_get_header_map_value", &[0, far - 1, 2, OUT, OUT_SIZE]),
        report("proxy_get_header_map_pairs", &[0, far - 3, OUT]),
        report("proxy_get_header_map_pairs", &[0, OUT, far - 3]),
        report("proxy_get_current_time_nanoseconds", &[far - 7]),
        report("proxy_set_shared_data", &[0, 4, far, 1, 0]),
        report("proxy_send_local_response", &[200, 0, 0, far, 1, 0, 0, 0]),
        report("proxy_http_call", &[0, 4, far, 1, 0, 0, 0, 0, 0, OUT]),
        report("proxy_get_metric", &[1, -4]),
        report("random_get", &[far, 1]),
        report("fd_write", &[1, -8, 1, OUT]),
        report("clock_time_get", &[0, 0, far]),
    ];
    let (wasi, wasi_far) = (Number(21), Number(21));
    let mut items = vec![INVALID_MEMORY; 9];
    items.extend([NOT_FOUND, wasi, wasi_far, Number(21)]);
    check("", &code.concat(), &items);
}

#[test]
fn settings_are_read_in_pieces() {
    let get = |kind, start, size| report("proxy_get_buffer_bytes", &[kind, start, size, OUT, OUT_SIZE]);
    let code = [
        get(7, 0, 100),
        TOLD.into(),
        get(7, 7, 3),
        TOLD.into(),
        get(7, 13, 1),
        TOLD.into(),
        get(7, 14, 1),
        get(6, 3, -1),
        TOLD.into(),
        get(0, 0, 1),
        get(2, 0, 1),
        get(99, 0, 1),
        report("proxy_get_buffer_status", &[7, OUT, OUT_SIZE]),
        "(call $report (i32.load (i32.const 16)))".into(),
        report("proxy_set_buffer_bytes", &[7, 0, 0, 0, 1]),
    ];
    let items = [
        OK,
        Text(b"plugin config"),
        OK,
        Text(b"con"),
        OK,
        BAD_ARGUMENT,
        OK,
        Text(b"config"),
        NOT_FOUND,
        NOT_FOUND,
        BAD_ARGUMENT,
        OK,
        Number(13),
        BAD_ARGUMENT,
    ];
    check("", &code.concat(), &items);
}

#[test]
fn properties_are_read_and_set() {
    let data = r#"(data (i32.const 1024) "request\00id") (data (i32.const 1040) "request\00headers\00x-a") (data (i32.const 1064) "plugin_root_id")
        (data (i32.const 1080) "my\00own") (data (i32.const 1088) "response\00code") (data (i32.const 1104) "penstock\00model") (data (i32.const 1120) "route_name")"#;
    let get = |at, size| report("proxy_get_property", &[at, size, OUT, OUT_SIZE]);
    let code = [
        get(1024, 10),
        TOLD.into(),
        get(1040, 19),
        TOLD.into(),
        get(1064, 14),
        TOLD.into(),
        get(1104, 14),
        TOLD.into(),
        get(1120, 10),
        TOLD.into(),
        get(1080, 6),
        report("proxy_set_property", &[1080, 6, 1024, 7]),
        get(1080, 6),
        TOLD.into(),
        get(1088, 13),
        get(0, -1),
    ];
    let items = [
        OK,
        Text(b"req_test"),
        OK,
        Text(b"1,2"),
        OK,
        Text(b"root"),
        OK,
        Text(b"m"),
        OK,
        Text(b"/test"),
        NOT_FOUND,
        OK,
        OK,
        Text(b"request"),
        NOT_FOUND,
        BAD_ARGUMENT,
    ];
    check(data, &code.concat(), &items);
}

#[test]
fn shared_data_is_compared_and_swapped() {
    let data = r#"(data (i32.const 1024) "keyonetwo")"#;
    let cas = "(i32.load (i32.const 24))";
    let set = |value: i64, cas: &str| {
        format!(
            "(call $report (call $proxy_set_shared_data (i32.const 1024) (i32.const 3) (i32.const {value}) (i32.const 3) {cas}))"
        )
    };
    let get = report("proxy_get_shared_data", &[1024, 3, OUT, OUT_SIZE, 24]);
    let code = [
        get.clone(),
        set(1027, "(i32.const 0)"),
        get.clone(),
        TOLD.into(),
        set(1030, cas),
        set(1027, cas),
        get,
        TOLD.into(),
    ];
    check(data, &code.concat(), &[NOT_FOUND, OK, OK, Text(b"one"), OK, CAS_MISMATCH, OK, Text(b"two")]);
}

#[test]
fn queues_are_filled_and_emptied() {
    let data = r#"(data (i32.const 1024) "queuevmother")"#;
    let code = [
        report("proxy_resolve_shared_queue", &[1029, 2, 1024, 5, OUT]),
        report("proxy_register_shared_queue", &[1024, 5, OUT]),
        "(call $report (i32.load (i32.const 16)))".into(),
        report("proxy_resolve_shared_queue", &[1029, 2, 1024, 5, OUT]),
        report("proxy_resolve_shared_queue", &[1031, 5, 1024, 5, OUT]),
        report("proxy_dequeue_shared_queue", &[1, OUT, OUT_SIZE]),
        report("proxy_enqueue_shared_queue", &[1, 1029, 2]),
        report("proxy_dequeue_shared_queue", &[1, OUT, OUT_SIZE]),
        TOLD.into(),
        report("proxy_enqueue_shared_queue", &[2, 1029, 2]),
        report("proxy_dequeue_shared_queue", &[0, OUT, OUT_SIZE]),
    ];
    let items = [NOT_FOUND, OK, Number(1), OK, NOT_FOUND, EMPTY, OK, OK, Text(b"vm"), NOT_FOUND, NOT_FOUND];
    check(data, &code.concat(), &items);
}

#[test]
fn metrics_are_defined_and_counted() {
    let data = r#"(data (i32.const 1024) "hits")"#;
    let code = [
        report("proxy_define_metric", &[0, 1024, 4, OUT]),
        report("proxy_increment_metric", &[1, 3]),
        report("proxy_increment_metric", &[1, -3]),
        report("proxy_record_metric", &[1, 3]),
        report("proxy_get_metric", &[1, 24]),
        "(call $report (i32.load (i32.const 24)))".into(),
        report("proxy_define_metric", &[7, 1024, 4, OUT]),
        report("proxy_get_metric", &[9, 24]),
    ];
    check(data, &code.concat(), &[OK, OK, BAD_ARGUMENT, BAD_ARGUMENT, OK, Number(3), BAD_ARGUMENT, NOT_FOUND]);
}

#[test]
fn the_clock_is_the_hosts() {
    let now = "(call $report (i32.wrap_i64 (i64.load (i32.const 24))))";
    let code = [
        report("proxy_get_current_time_nanoseconds", &[24]),
        now.into(),
        report("clock_time_get", &[1, 0, 24]),
        now.into(),
        report("clock_time_get", &[2, 0, 24]),
    ];
    check("", &code.concat(), &[OK, Number(1_234_567_890), OK, Number(1_234_567_890), Number(58)]);
}

#[test]
fn programs_find_no_arguments_no_environment_and_no_files() {
    let data = r#"(data (i32.const 1024) "\00\04\00\00\05\00\00\00")"#;
    let code = [
        "(i32.store (i32.const 16) (i32.const 7)) (i32.store (i32.const 20) (i32.const 7))".into(),
        report("environ_sizes_get", &[OUT, OUT_SIZE]),
        "(call $report (i32.load (i32.const 16))) (call $report (i32.load (i32.const 20)))".into(),
        report("args_sizes_get", &[OUT, OUT_SIZE]),
        report("fd_read", &[0, 0, 0, 0]),
        report("path_open", &[3, 0, 0, 0, 0, 0, 0, 0, 0]),
        report("fd_write", &[1, 1024, 1, OUT]),
        "(call $report (i32.load (i32.const 16)))".into(),
        report("fd_write", &[3, 1024, 1, OUT]),
        report("random_get", &[2048, 16]),
        report("random_get", &[2048, 1 << 20]),
        report("sched_yield", &[]),
    ];
    let items = [OK, Number(0), Number(0), OK, Number(8), Number(52), OK, Number(5), Number(8), OK, Number(28), OK];
    check(data, &code.concat(), &items);
}

#[test]
fn what_is_not_there_says_so() {
    let code = [
        report("proxy_grpc_call", &[0; 12]),
        report("proxy_grpc_cancel", &[1]),
        report("proxy_call_foreign_function", &[0, 4, 0, 0, OUT, OUT_SIZE]),
        report("proxy_continue_stream", &[2]),
        report("proxy_continue_stream", &[7]),
        report("proxy_close_stream", &[3]),
        report("proxy_done", &[]),
        report("proxy_set_effective_context", &[77]),
        report("proxy_set_effective_context", &[1]),
        report("proxy_set_effective_context", &[2]),
        report("proxy_log", &[9, 0, 0]),
        report("proxy_get_log_level", &[OUT]),
        "(call $report (i32.load (i32.const 16)))".into(),
        report("proxy_clear_route_cache", &[]),
    ];
    let items = [
        UNIMPLEMENTED,
        UNIMPLEMENTED,
        NOT_FOUND,
        UNIMPLEMENTED,
        BAD_ARGUMENT,
        UNIMPLEMENTED,
        NOT_FOUND,
        BAD_ARGUMENT,
        OK,
        OK,
        BAD_ARGUMENT,
        OK,
        Number(2),
        OK,
    ];
    check("", &code.concat(), &items);
}

/// Data of calls: `auth`, the three pseudo headers that a call needs, and a list without them.
const CALL_DATA: &str = r#"(data (i32.const 1024) "auth") (data (i32.const 1028) "evil")
    (data (i32.const 1040) "\03\00\00\00\07\00\00\00\03\00\00\00\05\00\00\00\01\00\00\00\0a\00\00\00\01\00\00\00:method\00GET\00:path\00/\00:authority\00a\00")"#;
const PAIRS_SIZE: i64 = 28 + 12 + 8 + 13;

#[test]
fn only_upstreams_of_the_settings_can_be_called() {
    let call = |upstream, size| report("proxy_http_call", &[upstream, 4, 1040, size, 0, 0, 0, 0, 1000, OUT]);
    let code = [
        call(1024, PAIRS_SIZE),
        "(call $report (i32.load (i32.const 16)))".into(),
        call(1028, PAIRS_SIZE),
        call(1024, 0),
    ];
    check(CALL_DATA, &code.concat(), &[OK, Number(1), BAD_ARGUMENT, BAD_ARGUMENT]);
}

#[test]
fn an_answer_to_a_call_is_read_by_the_context_that_it_is_for() {
    let call = report("proxy_http_call", &[1024, 4, 1040, PAIRS_SIZE, 0, 0, 0, 0, 1000, OUT]);
    let status = [
        report("proxy_get_status", &[24, OUT, OUT_SIZE]),
        "(call $report (i32.load (i32.const 24)))".into(),
        report("proxy_get_buffer_bytes", &[4, 0, 100, OUT, OUT_SIZE]),
        TOLD.into(),
        "(drop (call $proxy_set_effective_context (i32.const 2)))".into(),
        report("proxy_continue_stream", &[0]),
    ]
    .concat();
    let text = format!(
        "{CALL_DATA} (func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32) {call} (i32.const 1))
         (func (export \"proxy_on_http_call_response\") (param $context i32) (param $call i32) (param $headers i32) (param $body i32) (param $trailers i32)
            (call $report (local.get $context)) (call $report (local.get $call)) (call $report (local.get $headers)) (call $report (local.get $body))
            {status} (call $answer))"
    );
    let mut machine = start(&module(&text)).unwrap();
    let context = machine.create(stream()).unwrap();
    assert_eq!(machine.request_headers(context, true), Ok(Action::Pause));
    let calls = machine.take_calls();
    assert_eq!(
        (calls.len(), calls[0].origin, calls[0].upstream.as_str(), calls[0].timeout_ms),
        (1, context, "auth", 1000)
    );
    let mut headers = Fields::default();
    headers.push(":status", "418");
    machine.call_answered(calls[0].id, CallAnswer { headers, body: "tea".into(), ..CallAnswer::default() }).unwrap();
    let kept = machine.stream(context).unwrap();
    assert!(!kept.request_paused);
    let body = kept.local.take().unwrap().body;
    let items = [OK, Number(ROOT), Number(1), Number(1), Number(3), OK, Number(418), OK, Text(b"tea"), OK];
    assert_eq!(&body[..], &expected(&items)[..]);
}

#[track_caller]
fn spliced(start_at: i64, size: i64, expected: &str) {
    let code = report("proxy_set_buffer_bytes", &[0, start_at, size, 1024, 2]);
    let text = format!(
        "(data (i32.const 1024) \"xy\")
         (func (export \"proxy_on_request_body\") (param i32 i32 i32) (result i32) {code} (i32.const 0))"
    );
    let mut machine = start(&module(&text)).unwrap();
    let context = machine.create(stream()).unwrap();
    machine.request_body(context, "body".into(), true).unwrap();
    let body = machine.stream(context).unwrap().request_body.take().unwrap();
    assert_eq!((&body.bytes[..], body.changed), (expected.as_bytes(), true));
}

#[test]
fn bodies_are_written_in_front_behind_within_and_whole() {
    spliced(0, 0, "xybody");
    spliced(4, 0, "bodyxy");
    spliced(-1, -1, "bodyxy");
    spliced(0, 4, "xy");
    spliced(0, -1, "xy");
    spliced(1, 2, "bxyy");
    spliced(2, 0, "boxydy");
}

#[test]
fn a_paused_answer_grows_until_it_goes_on() {
    let text = "(func (export \"proxy_on_response_body\") (param i32 i32 i32) (result i32)
        (i32.lt_u (local.get 1) (i32.const 6)))";
    let mut machine = start(&module(text)).unwrap();
    let context = machine.create(stream()).unwrap();
    assert_eq!(machine.response_body(context, "abc".into(), false), Ok(Action::Pause));
    assert_eq!(machine.response_body(context, "def".into(), false), Ok(Action::Continue));
    assert_eq!(machine.stream(context).unwrap().response_body.take().unwrap().bytes, "abcdef");
}

#[test]
fn trailers_and_answers_can_be_changed_while_they_are_there() {
    let data = r#"(data (i32.const 1024) "tv:status404")"#;
    let add = |map| report("proxy_add_header_map_value", &[map, 1024, 1, 1025, 1]);
    let text = format!(
        "{data} (func (export \"proxy_on_request_trailers\") (param i32 i32) (result i32) {} (i32.const 0))
         (func (export \"proxy_on_response_headers\") (param i32 i32 i32) (result i32) {} {} {} (i32.const 0))
         (func (export \"proxy_on_response_trailers\") (param i32 i32) (result i32) {} (i32.const 0))",
        add(1),
        add(2),
        report("proxy_replace_header_map_value", &[2, 1026, 7, 1033, 3]),
        add(0),
        add(3),
    );
    let mut machine = start(&module(&text)).unwrap();
    let context = machine.create(stream()).unwrap();
    machine.request_trailers(context, Fields::default()).unwrap();
    let mut head = Fields::default();
    head.push(":status", "200");
    machine.response_headers(context, head, true).unwrap();
    machine.response_trailers(context, Fields::default()).unwrap();
    let kept = machine.stream(context).unwrap();
    assert_eq!(kept.request_trailers.as_ref().unwrap().fields.get("t").unwrap(), "v");
    assert_eq!(kept.response_headers.as_ref().unwrap().fields.get(":status").unwrap(), "404");
    assert_eq!(kept.response_trailers.as_ref().unwrap().fields.get("t").unwrap(), "v");
    assert!(kept.request_headers.fields.get("t").is_none(), "the request has gone on");
}

#[test]
fn queues_and_timers_wake_the_root_context() {
    let data = r#"(data (i32.const 1024) "q")"#;
    let text = format!(
        "{data} (global $seen (mut i32) (i32.const 0))
         (func (export \"proxy_on_configure\") (param i32 i32) (result i32)
            {} {} (i32.const 1))
         (func (export \"proxy_on_tick\") (param i32) {})
         (func (export \"proxy_on_queue_ready\") (param i32 i32) (global.set $seen (i32.add (global.get $seen) (i32.const 1))))
         (func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32)
            (call $report (global.get $seen)) (call $answer) (i32.const 0))",
        "(drop (call $proxy_register_shared_queue (i32.const 1024) (i32.const 1) (i32.const 16)))",
        "(drop (call $proxy_set_tick_period_milliseconds (i32.const 50)))",
        "(drop (call $proxy_enqueue_shared_queue (i32.const 1) (i32.const 1024) (i32.const 1)))".repeat(2),
    );
    let mut machine = start(&module(&text)).unwrap();
    assert_eq!(machine.tick_period_ms(), 50);
    machine.tick().unwrap();
    machine.settle().unwrap();
    let context = machine.create(stream()).unwrap();
    machine.request_headers(context, true).unwrap();
    assert_eq!(&machine.stream(context).unwrap().local.take().unwrap().body[..], 2_u32.to_le_bytes());
}

#[test]
fn a_context_that_is_not_done_lingers_until_it_is() {
    let text = "(func (export \"proxy_on_done\") (param i32) (result i32) (i32.const 0))
        (func (export \"proxy_on_tick\") (param i32)
            (drop (call $proxy_set_effective_context (i32.const 2))) (drop (call $proxy_done)))";
    let mut machine = start(&module(text)).unwrap();
    let context = machine.create(stream()).unwrap();
    machine.finish(context).unwrap();
    assert_eq!(machine.contexts(), 1);
    machine.tick().unwrap();
    machine.settle().unwrap();
    assert_eq!(machine.contexts(), 0);
}

#[test]
fn contexts_that_linger_have_a_bound() {
    let text = "(func (export \"proxy_on_done\") (param i32) (result i32) (i32.const 0))";
    let mut machine = start(&module(text)).unwrap();
    for _ in 0..1000 {
        let context = machine.create(stream()).unwrap();
        machine.finish(context).unwrap();
    }
    assert!(machine.contexts() <= 256, "{}", machine.contexts());
}
