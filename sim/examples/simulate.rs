//! Program with `penstock simulate` alone, for measuring: reads uncompressed traces only.

use clap::Parser;
use penstock_sim::fleet::command::{SimulateArgs, simulate};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    simulate: SimulateArgs,
}

fn open(path: &Path) -> std::io::Result<Box<dyn BufRead>> {
    Ok(Box::new(BufReader::new(File::open(path)?)))
}

fn main() {
    let arguments = Arguments::parse();
    if let Err(error) = simulate(&arguments.simulate, &open, &mut std::io::stdout().lock()) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
