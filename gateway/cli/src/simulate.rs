//! `penstock simulate`: opens files, gzipped or plain, for the fleet simulator, and draws its results.

mod charts;

use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};

use clap::Args;
use penstock_sim::fleet::command::{SimulateArgs, SimulateError, simulate};

use crate::page::PageFile;

/// First bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// `penstock simulate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Simulate {
    #[command(flatten)]
    args: SimulateArgs,
    /// Write the results as one page for a browser, which loads nothing else
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Runs the simulations that the arguments name.
pub(crate) fn run(Simulate { args, html }: &Simulate) -> anyhow::Result<()> {
    let html = PageFile::open(html.as_deref())?;
    let results = match simulate(args, &open, &mut io::stdout().lock()) {
        // The reader of the output has left, which is no error.
        Err(SimulateError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
        done => done?,
    };
    if !args.is_json() && io::stdout().is_terminal() {
        print!("{}", charts::text(&results));
    }
    html.map_or(Ok(()), |file| file.write(charts::page(&results), args.is_json()))
}

fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(File::open(path)?);
    let is_packed = file.fill_buf()?.starts_with(&GZIP);
    Ok(if is_packed { Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(file))) } else { Box::new(file) })
}
