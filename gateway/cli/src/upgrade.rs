//! `penstock upgrade`: the running gateway hands over to a new process.

use std::path::PathBuf;

use clap::Args;
use penstock_proxy::upgrade::{self, Started};

use crate::serve::{ConfigArgs, state_dir};

const EXAMPLES: &str = "\
Examples:
  penstock upgrade                                   the binary was replaced in its place, or the config has what needs a restart
  penstock upgrade --config /etc/penstock.toml       the gateway with this config's state directory
  penstock upgrade --program /opt/penstock-2/penstock

The new process gets the listening sockets, the workers and the counters of limits from the old one, which answers what it has begun
and ends. No connection is refused, no stream is cut. When the new process does not come up, the old one goes on and this command
says why, with exit status 1.";

/// `penstock upgrade`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct UpgradeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Binary to start [default: the path that the running gateway was started from]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Asks the running gateway to hand over, and waits for the outcome.
pub(crate) fn run(args: &UpgradeArgs) -> anyhow::Result<()> {
    // The new process has the environment of the running gateway, and this one may not: a provider's key need not be here.
    let state_dir = state_dir(&args.config.load_beside(&[])?)?;
    let program = args.program.as_ref().map(std::path::absolute).transpose()?;
    upgrade::ask(&state_dir, program, |step| match step {
        Started::Progress(text) => eprintln!("penstock: {text}"),
        Started::Done(pid) => println!("process {pid} serves"),
    })?;
    Ok(())
}
