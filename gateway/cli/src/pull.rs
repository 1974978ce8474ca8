//! `penstock pull`: fetches a model from a hub into the local store, with a progress display on a terminal.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use penstock_models::{ModelName, Progress, Pulled, Request, Stage};
use penstock_worker::{ModelOptions, inspect};

use crate::models::{Place, facts};

const EXAMPLES: &str = "\
Examples:
  penstock pull Qwen/Qwen3-0.6B                     a checkpoint: config, tokenizer and safetensors
  penstock pull Qwen/Qwen3-0.6B-GGUF:Q8_0           the GGUF files of one quantization
  penstock pull hf.co/Qwen/Qwen3-0.6B@c1899de       a branch, a tag or a commit
  penstock serve --model Qwen/Qwen3-0.6B            then it is served by its name

A pull that was interrupted goes on where it was. Nothing is in the store before all of it is there and checked. Without :QUANT, a repository
of GGUF files gives its only one, or Q4_K_M. Pickles (.bin, .pt) are never fetched.
Tokens: HF_TOKEN, or hub.token_env and hub.token_file of the config. Other hubs: HF_ENDPOINT, or hub.endpoint and hub.mirrors.";

/// Time between two looks at the progress.
const TICK: Duration = Duration::from_millis(100);

/// `penstock pull`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PullArgs {
    /// ORG/REPO on the hub, with :QUANT for a GGUF model and @REVISION
    #[arg(value_name = "NAME")]
    name: String,
    /// Print nothing but errors
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    place: Place,
}

/// Fetches a model, and says where it is.
pub(crate) fn run(args: &PullArgs) -> anyhow::Result<()> {
    let name = ModelName::parse(&args.name)?;
    let (config, store) = args.place.open()?;
    let hub = config.hub.hub(&|name| std::env::var(name).ok()).map_err(anyhow::Error::msg)?;
    let request = Request { name, store, hub };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("a runtime")?;
    let Pulled { model, was_there } = runtime.block_on(shown(&request, args.quiet))?;
    if args.place.json {
        println!("{}", serde_json::to_string_pretty(&facts(&model)).context("the model as JSON")?);
    } else if !args.quiet {
        let verb = if was_there { "is in the store" } else { "pulled" };
        println!("{}@{} {verb}: {:.2} GB", model.name(), model.commit(), model.manifest.bytes() as f64 / 1e9);
        println!("  penstock serve --model {}", model.name());
    }
    let look = ModelOptions { model: Some(model.path()), threads: 1, ..ModelOptions::default() };
    if let Err(error) = inspect::inspect(&look) {
        say(&format!("this version of penstock cannot serve it: {:#}", anyhow::Error::from(error)));
    }
    Ok(())
}

/// Pulls, and shows how far it is: a bar on a terminal, in a pipe only what goes wrong.
async fn shown(request: &Request, quiet: bool) -> anyhow::Result<Pulled> {
    let progress = Arc::new(Progress::default());
    let is_shown = !quiet && std::io::stderr().is_terminal();
    let bar = Bar::new(is_shown);
    let mut pulling = std::pin::pin!(penstock_models::pull(request, &progress));
    let done = loop {
        match tokio::time::timeout(TICK, &mut pulling).await {
            Ok(done) => break done,
            Err(_) => bar.draw(request, &progress, quiet),
        }
    };
    bar.draw(request, &progress, quiet);
    bar.0.finish_and_clear();
    Ok(done?)
}

struct Bar(ProgressBar);

impl Bar {
    fn new(is_shown: bool) -> Self {
        let target = if is_shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        let style = "{msg:30!} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(bar)
    }

    fn draw(&self, request: &Request, progress: &Progress, quiet: bool) {
        let (done, total) = progress.bytes();
        let doing = match progress.stage() {
            Stage::Asking => "asking the hub",
            Stage::Waiting => "waiting for another pull",
            Stage::Fetching => &request.name.repo,
            Stage::Checking => "checking",
        };
        if self.0.message() != doing {
            // What an earlier pull has fetched says nothing about the rate of this one.
            self.0.set_message(doing.to_owned());
            self.0.set_position(done);
            self.0.reset_eta();
        }
        self.0.set_length(total);
        self.0.set_position(done);
        for note in progress.notes() {
            if !quiet {
                self.0.suspend(|| say(&note));
            }
        }
    }
}

/// Writes a line on standard error; an error of that is ignored.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "penstock: {line}");
}
