//! Package `penstock`, the one binary: reads the command line, starts a process, and reports errors with advice.
#![forbid(unsafe_code)]

#[macro_use]
mod out;

mod admin;
mod bench;
mod chart;
mod chat;
mod check;
mod completions;
mod demo;
mod import;
mod keys;
mod log;
mod man;
mod models;
mod page;
mod progress;
mod pull;
mod serve;
mod simulate;
mod top;
mod upgrade;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Global allocator: streams come and go in waves, and this allocator returns the memory of a wave.
#[global_allocator]
static ALLOCATOR: penstock_allocator::Allocator = penstock_allocator::Allocator;

const EXAMPLES: &str = "\
Examples:
  penstock serve                                  the embedded demo model at http://127.0.0.1:8080
  penstock serve --model ~/models/Qwen3-0.6B      a model of yours: a checkpoint folder, or a GGUF file
  penstock pull Qwen/Qwen3-0.6B                   fetch one from a hub; then serve --model Qwen/Qwen3-0.6B
  penstock chat                                   talk to it in the terminal; penstock chat \"PROMPT\" asks once
  penstock check --config penstock.toml           what would be served, or everything that is wrong

An OpenAI client needs nothing but the address:
  OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none python app.py";

const WORKER_EXAMPLES: &str = "\
A worker started by hand is named in the gateway's config:
  penstock worker --model ~/models/Qwen3-0.6B --listen unix:///run/penstock/worker.sock
  [[pools]]
  connect = [\"unix:///run/penstock/worker.sock\"]

Over TCP both sides prove a shared secret:
  head -c 32 /dev/urandom | base64 > pool.key
  penstock worker --listen tcp://127.0.0.1:7070 --key-file pool.key";

/// AI gateway with its own inference engine.
///
/// `penstock serve` answers the APIs of OpenAI, Anthropic, Gemini and Ollama. It starts its engine as worker processes, continues their
/// answers when one dies, asks other providers where the config names them, and needs no other software.
#[derive(Parser, Debug)]
#[command(name = "penstock", version, after_help = EXAMPLES, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run the gateway and its workers
    Serve(Box<serve::ServeArgs>),
    /// Run one worker for gateways elsewhere (serve starts its own workers)
    #[command(after_help = WORKER_EXAMPLES)]
    Worker(Box<penstock_worker::WorkerArgs>),
    /// Fetch a model from a hub into the local store
    Pull(pull::PullArgs),
    /// List, show, remove and verify the models of the local store
    Models(models::ModelsArgs),
    /// Issue, list, rotate and revoke API keys
    Keys(keys::KeysArgs),
    /// Inspect and control a running gateway
    Admin(Box<admin::AdminArgs>),
    /// Show which worker of a pool would get a prompt now, and why
    Explain(Box<admin::ExplainArgs>),
    /// Watch pools and workers of a running gateway: queues, roles, hit rates, transfers
    Top(top::TopArgs),
    /// Talk to a model in the terminal
    Chat(chat::ChatArgs),
    /// Hand the running gateway over to a new process, without cutting streams
    Upgrade(Box<upgrade::UpgradeArgs>),
    /// Translate the config of another gateway
    Import(import::ImportArgs),
    /// Check the config: print what would be served, or all faults, without serving
    Check(Box<check::CheckArgs>),
    /// Measure how fast this machine computes a model, beside the machine's limits
    Bench(Box<bench::BenchArgs>),
    /// Print the completion script of a shell
    Completions(completions::CompletionsArgs),
    /// Print the manual page, or write those of all commands
    Man(man::ManArgs),
    /// Print the version
    Version,
    /// Simulate: replay traffic through the router in front of modelled engines, and report latencies
    Simulate(Box<simulate::Simulate>),
}

/// Whole command line, as completions and manual pages are made from it.
fn command() -> clap::Command {
    Cli::command()
}

fn main() -> ExitCode {
    // The choice of cryptography is ours, whatever the libraries below would pick. Err: somebody chose before, impossible here.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let done = match Cli::parse().command {
        Command::Serve(args) => serve::run(&args),
        Command::Worker(mut args) => {
            args.model = args.model.take().map(penstock_config::named_model);
            return penstock_worker::main(&args);
        }
        Command::Pull(args) => pull::run(&args),
        Command::Models(args) => models::run(&args),
        Command::Keys(args) => keys::run(&args),
        Command::Admin(args) => admin::run(&args),
        Command::Explain(args) => admin::explain(*args),
        Command::Top(args) => top::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Completions(args) => {
            completions::run(&args, command());
            Ok(())
        }
        Command::Man(args) => man::run(&args, command()),
        Command::Version => {
            println!("penstock {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("penstock: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dialect_is_named() {
        let help = |path: &[&str]| {
            let mut found = command();
            for name in path {
                found = found.find_subcommand(name).expect("a command").clone();
            }
            found.render_long_help().to_string()
        };
        for dialect in penstock_auth::DIALECTS {
            for path in [&["keys", "create"][..], &["admin", "keys", "create"]] {
                assert!(help(path).contains(dialect), "{dialect} in the help of {path:?}");
            }
            assert!(help(&[]).to_ascii_lowercase().contains(dialect), "{dialect} in the program's help");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }
}
