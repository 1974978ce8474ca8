//! `penstock models`: the models of the local store.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use penstock_config::Snapshot;
use penstock_models::{Model, Store};
use serde_json::{Value, json};

use crate::admin::table;
use crate::out::harmless;
use crate::serve::{ConfigArgs, state_dir};

const EXAMPLES: &str = "\
Examples:
  penstock models                                   what is there
  penstock models show Qwen/Qwen3-0.6B              its path, files and checksums
  penstock models remove Qwen/Qwen3-0.6B@c1899de    one commit; without it, all
  penstock models verify                            read everything and compare checksums

penstock pull fetches models; penstock serve --model NAME serves them.";

/// `penstock models`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct ModelsArgs {
    #[command(subcommand)]
    command: Option<ModelsCommand>,
    #[command(flatten)]
    place: Place,
}

#[derive(Subcommand, Clone, Debug)]
enum ModelsCommand {
    /// List the models of the store
    List(Place),
    /// Show a model: path, files, checksums
    Show(OneArgs),
    /// Remove a model, and what an unfinished pull of it has left
    Remove(OneArgs),
    /// Read models whole and compare sizes and checksums
    Verify(VerifyArgs),
}

#[derive(Args, Clone, Debug)]
struct OneArgs {
    /// ORG/REPO, with :QUANT and @COMMIT where there are several
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    place: Place,
}

#[derive(Args, Clone, Debug)]
struct VerifyArgs {
    /// Model to verify [default: all]
    #[arg(value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    place: Place,
}

/// Place of the store.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Place {
    /// Config file of the gateway
    #[arg(long, short, value_name = "FILE", env = "PENSTOCK_CONFIG")]
    config: Option<PathBuf>,
    /// State folder of the gateway, which holds the models [default: ~/.local/state/penstock]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Folder of the models [default: models in the state folder]
    #[arg(long, value_name = "DIR")]
    models_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl Place {
    /// Config, and the store that it names.
    pub(crate) fn open(&self) -> anyhow::Result<(Snapshot, Store)> {
        let Self { config, state_dir: state, models_dir, .. } = self.clone();
        let config = ConfigArgs { config, state_dir: state, models_dir, ..ConfigArgs::default() }.load_beside(&[])?;
        let store = match &config.hub.folder {
            Some(folder) => Store::at(std::path::absolute(folder).context("the folder of the models")?),
            None => config.hub.store(&state_dir(&config)?),
        };
        Ok((config, store))
    }
}

/// Runs one of the commands.
pub(crate) fn run(args: &ModelsArgs) -> anyhow::Result<()> {
    match &args.command {
        None => list(&args.place),
        Some(ModelsCommand::List(place)) => list(place),
        Some(ModelsCommand::Show(one)) => show(one),
        Some(ModelsCommand::Remove(one)) => remove(one),
        Some(ModelsCommand::Verify(all)) => verify(all),
    }
}

fn list(place: &Place) -> anyhow::Result<()> {
    let (_, store) = place.open()?;
    let found = store.list()?;
    let rows: Vec<Value> = found.models.iter().map(facts).collect();
    let unfinished: Vec<Value> = found
        .unfinished
        .iter()
        .map(|one| json!({ "name": one.key, "bytes": one.bytes, "size": size(one.bytes) }))
        .collect();
    if place.json {
        println!(
            "{:#}",
            json!({ "folder": store.folder(), "models": rows, "unfinished": unfinished, "faults": found.faults })
        );
        return Ok(());
    }
    if rows.is_empty() {
        println!("no models in {}; penstock pull ORG/REPO fetches one", store.folder().display());
    } else {
        let columns = [
            ("NAME", "name"),
            ("FORMAT", "format"),
            ("WEIGHTS", "quantization"),
            ("CONTEXT", "context_tokens"),
            ("SIZE", "size"),
            ("COMMIT", "commit_short"),
            ("PULLED", "pulled_at*"),
        ];
        print!("{}", table(&rows, &columns));
    }
    if !unfinished.is_empty() {
        println!("unfinished pulls, which penstock pull goes on with:");
        print!("{}", table(&unfinished, &[("NAME", "name"), ("SIZE", "size")]));
    }
    for fault in found.faults {
        println!("no model: {}", harmless(&fault));
    }
    Ok(())
}

fn show(one: &OneArgs) -> anyhow::Result<()> {
    let (_, store) = one.place.open()?;
    let model = store.find(&one.name)?;
    let facts = facts(&model);
    if one.place.json {
        println!("{facts:#}");
        return Ok(());
    }
    let lines = [
        ("name", "name"),
        ("commit", "commit"),
        ("revision", "revision"),
        ("hub", "hub"),
        ("pulled", "pulled_at*"),
        ("format", "format"),
        ("architecture", "architecture"),
        ("weights", "quantization"),
        ("context", "context_tokens"),
        ("size", "size"),
        ("path", "path"),
    ];
    for (head, path) in lines {
        println!("{head:<14}{}", crate::admin::value(&facts, path));
    }
    println!("files");
    for file in &model.manifest.files {
        println!("  {:<40} {:>12}  {}", file.name, file.size, file.sum);
    }
    Ok(())
}

fn remove(one: &OneArgs) -> anyhow::Result<()> {
    let (_, store) = one.place.open()?;
    let removed = store.remove(&one.name)?;
    if one.place.json {
        println!("{:#}", json!({ "removed": removed.names, "bytes": removed.bytes }));
    } else {
        println!("removed {}: {} free", removed.names.join(", "), size(removed.bytes));
    }
    Ok(())
}

fn verify(all: &VerifyArgs) -> anyhow::Result<()> {
    let (_, store) = all.place.open()?;
    let models = match &all.name {
        Some(name) => vec![store.find(name)?],
        None => store.list()?.models,
    };
    let mut rows = Vec::new();
    let mut damaged = Vec::new();
    for model in &models {
        let faults = model.verify(&|_| {});
        if !all.place.json {
            println!("{}@{}  {}", model.name(), model.commit(), if faults.is_empty() { "good" } else { "DAMAGED" });
            faults.iter().for_each(|fault| println!("  {}", harmless(fault)));
        }
        if !faults.is_empty() {
            damaged.push(format!("{}@{}", model.name(), model.commit()));
        }
        rows.push(json!({ "name": model.name(), "commit": model.manifest.commit, "good": faults.is_empty(), "faults": faults }));
    }
    if all.place.json {
        println!("{:#}", json!({ "models": rows }));
    }
    if !damaged.is_empty() {
        bail!("damaged: {}; remove them (penstock models remove NAME) and pull them again", damaged.join(", "));
    }
    Ok(())
}

/// Facts of a model, as `--json` prints them.
pub(crate) fn facts(model: &Model) -> Value {
    let manifest = &model.manifest;
    json!({
        "name": model.name(),
        "commit": manifest.commit,
        "commit_short": model.commit(),
        "revision": manifest.revision,
        "hub": manifest.hub,
        "pulled_at": manifest.pulled_at,
        "format": manifest.facts.format,
        "architecture": manifest.facts.architecture,
        "quantization": manifest.facts.quantization,
        "context_tokens": manifest.facts.context_tokens,
        "bytes": manifest.bytes(),
        "size": size(manifest.bytes()),
        "path": model.path(),
        "files": manifest.files,
    })
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}
