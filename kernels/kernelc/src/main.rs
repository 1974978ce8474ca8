//! `kernelc`: compiles the CUDA kernels and checks what is committed.

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Compiles the CUDA kernels and checks what is committed")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, Subcommand)]
enum Command {
    /// Checks hashes, architectures and budgets, without a compiler.
    Check,
    /// Compiles everything and compares the bytes with what is committed.
    Verify,
    /// Compiles everything and writes cubins and manifest.
    Build,
}

fn main() -> anyhow::Result<()> {
    let folder = penstock_kernelc::folder();
    match Args::parse().command {
        Command::Check => penstock_kernelc::check(&folder),
        Command::Verify => penstock_kernelc::check(&folder).and_then(|()| penstock_kernelc::rebuild(&folder, false)),
        Command::Build => penstock_kernelc::rebuild(&folder, true),
    }
}
