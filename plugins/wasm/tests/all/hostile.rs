//! Plugins that call anything with anything, and modules that were damaged: the host answers or stops them, and never breaks itself.

use crate::support;

use penstock_wasm::host::{CallAnswer, Fields, Machine};
use proptest::prelude::*;
use support::{FUNCTIONS, WASI, compile_sdk, host, module, start, stream};

/// Numbers that are likely to break something: around the ends of memory, signs, sizes.
fn number() -> impl Strategy<Value = i64> {
    prop_oneof![
        4 => 0..300_i64,
        2 => prop::sample::select(vec![0, 1, -1, 4, 16, 1024, 65_535, 65_536, 131_068, 131_071, 131_072, 131_073, i64::from(i32::MAX), i64::from(i32::MIN)]),
        1 => any::<i32>().prop_map(i64::from),
    ]
}

/// One call with some arguments, its result dropped.
fn call() -> impl Strategy<Value = String> {
    let all: Vec<_> = FUNCTIONS.iter().chain(WASI).copied().collect();
    (prop::sample::select(all), prop::collection::vec(number(), 12)).prop_map(|((name, parameters), numbers)| {
        let constants: Vec<_> = parameters
            .chars()
            .zip(numbers)
            .map(|(kind, number)| format!("({}.const {number})", if kind == 'l' { "i64" } else { "i32" }))
            .collect();
        format!("(drop (call ${name} {}))\n", constants.join(" "))
    })
}

fn calls() -> impl Strategy<Value = String> {
    prop::collection::vec(call(), 0..12).prop_map(|calls| calls.concat())
}

/// Takes a request through every callback; stops at the first error.
fn live(machine: &mut Machine) -> Result<(), penstock_wasm::WasmError> {
    let context = machine.create(stream())?;
    machine.request_headers(context, false)?;
    machine.request_body(context, "a body".into(), true)?;
    for call in machine.take_calls() {
        machine.call_answered(call.id, CallAnswer::default())?;
    }
    machine.settle()?;
    let mut head = Fields::default();
    head.push(":status", "200");
    machine.response_headers(context, head, true)?;
    for (piece, end) in [("data: 1\n\n", false), ("", true)] {
        machine.response_body(context, piece.into(), end)?;
    }
    machine.tick()?;
    machine.settle()?;
    machine.finish(context)?;
    machine.settle()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_calls_with_any_arguments(
        data in prop::collection::vec(any::<u8>(), 64),
        codes in prop::collection::vec(calls(), 9),
    ) {
        let bytes: String = data.iter().map(|byte| format!("\\{byte:02x}")).collect();
        let function = |name: &str, parameters: &str, result: &str, code: &str| {
            let value = if result.is_empty() { "" } else { "(i32.and (i32.load (i32.const 8)) (i32.const 1))" };
            let result = if result.is_empty() { String::new() } else { format!("(result {result})") };
            format!("(func (export \"{name}\") (param {parameters}) {result} {code} {value})")
        };
        let text = [
            format!("(data (i32.const 0) \"{bytes}\")"),
            function("proxy_on_context_create", "i32 i32", "", &codes[0]),
            function("proxy_on_request_headers", "i32 i32 i32", "i32", &codes[1]),
            function("proxy_on_request_body", "i32 i32 i32", "i32", &codes[2]),
            function("proxy_on_http_call_response", "i32 i32 i32 i32 i32", "", &codes[3]),
            function("proxy_on_response_headers", "i32 i32 i32", "i32", &codes[4]),
            function("proxy_on_response_body", "i32 i32 i32", "i32", &codes[5]),
            function("proxy_on_tick", "i32", "", &codes[6]),
            function("proxy_on_done", "i32", "i32", &codes[7]),
            function("proxy_on_log", "i32", "", &codes[8]),
        ].concat();
        if let Ok(mut machine) = start(&module(&text)) {
            let _ = live(&mut machine);
        }
    }

    #[test]
    fn damaged_modules(
        damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = include_bytes!("../sdk/plugin.wasm").to_vec();
        for (index, byte) in damages {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            let length = cut.index(bytes.len());
            bytes.truncate(length);
        }
        if let Ok(program) = compile_sdk(&bytes)
            && let Ok(mut machine) = Machine::start(&program, Some(host()))
        {
            let _ = live(&mut machine);
        }
    }
}
