//! Cost of a request and a chunk at a gateway: a closed-loop load for any OpenAI endpoint, and a mock upstream for
//! peers.
//!
//! ```text
//! penstock-load run --url http://127.0.0.1:8080 --model M --pid GATEWAY --connections 64 --stream   one JSON line
//! penstock-load mock --listen 127.0.0.1:9100                                                        an upstream
//! penstock-load replay --url http://127.0.0.1:8080 --trace T.jsonl --speed 5 --tokens-each 8                 a trace, in modelled time
//! ```
//!
//! CPU time is that of the process named by `--pid` alone (user and system, all threads), divided by its requests or
//! chunks. That figure survives a busy machine; latencies do not, so compare those only within one quiet run. Every
//! answer is checked: status, order of its events, finish reason, `[DONE]`, with `--exact` every byte; a wrong one
//! counts as an error and in no average.
#![forbid(unsafe_code)]

mod client;
mod mock;
mod process;
mod replay;
mod report;

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, Parser};

/// Load for any OpenAI endpoint, and a mock of one.
#[derive(Parser)]
enum Command {
    /// Sends requests, checks every answer, prints one JSON line
    Run(RunArgs),
    /// Serves /v1/chat/completions with as many chunks as max_tokens asks for
    Mock(MockArgs),
    /// Sends the requests of a trace when they are due, to a fleet of modelled workers; prints one JSON line
    Replay(replay::ReplayArgs),
}

/// What to send.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunArgs {
    /// Endpoint, without /v1
    #[arg(long)]
    pub(crate) url: String,
    /// Model to name in requests
    #[arg(long)]
    pub(crate) model: String,
    /// API key to send
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// Name of this run in the report
    #[arg(long, default_value = "run")]
    pub(crate) name: String,
    /// Process whose CPU and memory are reported
    #[arg(long)]
    pub(crate) pid: Option<u32>,
    /// Requests at once
    #[arg(long, default_value_t = 16)]
    pub(crate) connections: usize,
    /// Requests in all
    #[arg(long, default_value_t = 1000)]
    pub(crate) requests: usize,
    /// Requests before the measurement begins
    #[arg(long, default_value_t = 64)]
    pub(crate) warmup: usize,
    /// Output tokens per request
    #[arg(long, default_value_t = 1)]
    pub(crate) tokens: u32,
    /// Ask for streams
    #[arg(long)]
    pub(crate) stream: bool,
    /// Length of the prompt
    #[arg(long, value_name = "BYTES", default_value_t = 256)]
    pub(crate) prompt_bytes: usize,
    /// Every request has a prompt of its own, different from its first characters on: no prefix cache helps
    #[arg(long)]
    pub(crate) distinct: bool,
    /// Ask the mock for this time between two chunks, in place of its own
    #[arg(long, value_name = "MS")]
    pub(crate) gap_ms: Option<u64>,
    /// Compare every answer with what the mock sends, byte by byte
    #[arg(long)]
    pub(crate) exact: bool,
    /// Do it all so many times on new connections, and report the memory after each
    #[arg(long, default_value_t = 1)]
    pub(crate) waves: usize,
    /// Connections are opened evenly over this time
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub(crate) ramp_ms: u64,
    /// The run fails after this time
    #[arg(long, value_name = "S", default_value_t = 300)]
    pub(crate) timeout_s: u64,
}

/// How to answer.
#[derive(Args, Clone, Debug)]
pub(crate) struct MockArgs {
    /// Address to serve on
    #[arg(long, default_value = "127.0.0.1:9100")]
    pub(crate) listen: SocketAddr,
    /// Time between two chunks
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub(crate) gap_ms: u64,
}

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match Command::parse() {
        Command::Mock(args) => runtime.block_on(mock::serve(args.listen, Duration::from_millis(args.gap_ms))),
        Command::Replay(args) => {
            println!("{}", runtime.block_on(replay::run(args))?);
            Ok(())
        }
        Command::Run(args) => {
            println!("{}", runtime.block_on(client::run(&args))?);
            Ok(())
        }
    }
}
