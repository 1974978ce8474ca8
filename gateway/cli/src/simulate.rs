//! `penstock simulate`: opens files, gzipped or plain, for the fleet simulator.

use penstock_sim::fleet::command::{SimulateArgs, SimulateError, simulate};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

/// First bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Runs the simulations that the arguments name.
pub(crate) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    match simulate(args, &open, &mut io::stdout().lock()) {
        // The reader of the output has left, which is no error.
        Err(SimulateError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => Ok(done?),
    }
}

fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(File::open(path)?);
    let is_packed = file.fill_buf()?.starts_with(&GZIP);
    Ok(if is_packed { Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(file))) } else { Box::new(file) })
}
