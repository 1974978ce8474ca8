//! Cost of a plugin: printed, so that the figures in the guide can be made again (`cargo test -p penstock-wasm
//! --features host --release --test all cost -- --nocapture`), and checked against bounds far above the expected values.

use crate::support;

use std::time::{Duration, Instant};

use penstock_plugins::{EndFacts, Outcome};
use penstock_types::Usage;
use penstock_wasm::host::{Fields, Machine};
use penstock_wasm::{Limits, WasmError};
use support::{compile, compile_sdk, host, module, start, stream};

/// Best time per turn of some rounds.
fn best(turns: u32, mut turn: impl FnMut()) -> Duration {
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let begun = Instant::now();
        (0..turns).for_each(|_| turn());
        best = best.min(begun.elapsed() / turns);
    }
    best
}

const EMPTY: &str = "(func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32) (i32.const 0))
    (func (export \"proxy_on_response_body\") (param i32 i32 i32) (result i32) (i32.const 0))";

fn chunk() -> bytes::Bytes {
    let text = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n";
    bytes::Bytes::from_static(text.as_bytes())
}

fn costs(name: &str, mut machine: Machine) -> (Duration, Duration) {
    let request = best(500, || {
        let context = machine.create(stream()).unwrap();
        machine.request_headers(context, false).unwrap();
        machine.request_body(context, "{\"model\":\"m\"}".into(), true).unwrap();
        machine.response_headers(context, Fields::default(), true).unwrap();
        let usage = Usage::default();
        let duration = Duration::ZERO;
        let end = EndFacts { outcome: Outcome::Complete, model: "m".into(), target: None, usage, duration };
        machine.stream(context).unwrap().facts.end = Some(end);
        machine.finish(context).unwrap();
    });
    let context = machine.create(stream()).unwrap();
    let piece = best(2000, || {
        machine.response_body(context, chunk(), false).unwrap();
        machine.stream(context).unwrap().response_body = None;
    });
    println!("{name}: {request:?} per request, {piece:?} per piece of {} bytes", chunk().len());
    (request, piece)
}

#[test]
fn a_request_and_a_piece_cost_microseconds() {
    let (request, piece) = costs("empty plugin", start(&module(EMPTY)).unwrap());
    assert!(request < Duration::from_millis(2) && piece < Duration::from_millis(1), "{request:?} {piece:?}");
    let sdk = compile_sdk(include_bytes!("../sdk/plugin.wasm")).unwrap();
    let (request, piece) = costs("plugin of a kit", Machine::start(&sdk, Some(host())).unwrap());
    assert!(request < Duration::from_millis(20) && piece < Duration::from_millis(5), "{request:?} {piece:?}");
}

#[test]
fn compiling_and_starting() {
    let bytes = include_bytes!("../sdk/plugin.wasm");
    let compiling = best(1, || drop(compile_sdk(bytes).unwrap()));
    let program = compile_sdk(bytes).unwrap();
    let starting = best(5, || drop(Machine::start(&program, Some(host())).unwrap()));
    let machine = Machine::start(&program, Some(host())).unwrap();
    println!(
        "module of {} bytes: compiled in {compiling:?}, started in {starting:?}, {} bytes of memory",
        bytes.len(),
        machine.memory_bytes()
    );
    assert!(starting < Duration::from_millis(500), "{starting:?}");
}

#[test]
fn fuel_is_a_bound_of_time() {
    let text = "(func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32) (local $i i32)
        (loop $again (local.set $i (i32.add (i32.mul (local.get $i) (i32.const 31)) (i32.const 7))) (br $again)) (i32.const 0))";
    let program = compile(&module(text)).unwrap();
    let spent = best(3, || {
        let mut machine = Machine::start(&program, Some(host())).unwrap();
        let context = machine.create(stream()).unwrap();
        let broken = machine.request_headers(context, true);
        assert_eq!(broken, Err(WasmError::Fuel { callback: "proxy_on_request_headers" }));
    });
    println!("{} of fuel: {spent:?}", Limits::default().fuel);
    assert!(spent < Duration::from_secs(1), "{spent:?}");
}
