//! `penstock import`: config files of other gateways, translated.

mod litellm;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};

const EXAMPLES: &str = "\
Examples:
  penstock import litellm config.yaml > penstock.toml
  penstock check --config penstock.toml

The translation goes to standard output; what has no translation is listed in its head and on standard error. Keys that stand in the
file in clear text are not copied: the output names an environment variable for each.";

/// Largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// `penstock import`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ImportArgs {
    #[command(subcommand)]
    from: From,
}

#[derive(Subcommand, Clone, Debug)]
enum From {
    /// Translate a config.yaml of LiteLLM
    Litellm {
        /// Path of the file
        file: PathBuf,
    },
}

/// Translated config.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Imported {
    /// TOML for `penstock serve --config`.
    toml: String,
    /// Settings without a translation, or with another meaning: path in the source, and reason.
    left: Vec<String>,
}

impl Imported {
    /// Returns the text of the translated config file: a comment header that names `source` and lists the settings that
    /// were not translated or have another meaning, then the TOML.
    fn text(&self, source: &str) -> String {
        let mut out = format!("# Translated from {source} by `penstock import`.\n");
        if !self.left.is_empty() {
            out += "#\n# Not translated, or with another meaning:\n";
            for line in &self.left {
                out += &format!("# - {line}\n");
            }
        }
        out + &self.toml
    }
}

/// Prints the translation.
pub(crate) fn run(args: &ImportArgs) -> anyhow::Result<()> {
    let From::Litellm { file } = &args.from;
    let name = file.display().to_string();
    let bytes = std::fs::metadata(file).with_context(|| name.clone())?.len();
    anyhow::ensure!(bytes <= FILE_BYTES_MAX, "{name}: larger than {} MiB", FILE_BYTES_MAX >> 20);
    let text = std::fs::read_to_string(file).with_context(|| name.clone())?;
    let imported = litellm::translate(&text).with_context(|| name.clone())?;
    print!("{}", imported.text("a LiteLLM config"));
    for line in &imported.left {
        eprintln!("not translated: {line}");
    }
    Ok(())
}
