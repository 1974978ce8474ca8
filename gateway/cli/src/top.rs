//! `penstock top`: pools and workers of a running gateway, live, from its admin API.
//!
//! ```text
//! terminal:        asks every second ─▶ View ─▶ drawn by ratatui; keys sort, scroll, hold and leave
//! piped, --once:   two looks ─▶ one snapshot as text
//! --json:          a line of JSON per look
//! ```

mod columns;
mod draw;
mod figures;
mod view;

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use ratatui::crossterm::{event, terminal};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::admin::{Client, Place, connect};
use figures::{Sums, look, troubles};
use view::{Then, View};

/// Most keys that wait while a frame is drawn. The terminal buffers further ones.
const KEYS_WAITING_MAX: usize = 16;

/// `penstock top`.
#[derive(Args, Clone, Debug)]
#[command(after_help = view::HELP)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    place: Place,
    /// Seconds between two refreshes
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS", value_parser = every)]
    every: f64,
    /// Print one sample and exit; also the behaviour where standard output is no terminal
    #[arg(long)]
    once: bool,
}

fn every(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().map_err(|error| error.to_string())?;
    if (0.1..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("from 0.1 to 3600".into()) }
}

/// Shows pools and workers until the user leaves.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<()> {
    let client = connect(&args.place)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let is_screen = std::io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
    if is_screen && !args.once && !args.place.json {
        return runtime.block_on(watch(client, args));
    }
    runtime.block_on(print(&client, args))
}

/// Prints one snapshot, or JSON until the reader leaves.
async fn print(client: &Client, args: &TopArgs) -> anyhow::Result<()> {
    let mut sums = Sums::default();
    look(client, &mut sums).await?;
    loop {
        tokio::time::sleep(Duration::from_secs_f64(args.every)).await;
        let (pools, workers) = look(client, &mut sums).await?;
        if args.place.json {
            println!("{}", json!({ "pools": pools, "workers": workers }));
        } else {
            let width = if std::io::stdout().is_terminal() { terminal::size().ok() } else { None };
            print!("{}", snapshot(&pools, &workers, width.map(|(columns, _)| columns.into())));
        }
        if args.once || !args.place.json {
            return Ok(());
        }
    }
}

/// Text of both tables and of the troubles. `width`: columns of the terminal, if the output is one.
fn snapshot(pools: &[Value], workers: &[Value], width: Option<usize>) -> String {
    let mut out = columns::plain(columns::POOLS, pools, width);
    out.push('\n');
    out += &columns::plain(columns::of_workers(workers), workers, width);
    for line in troubles(workers) {
        out += &format!("\n{line}");
    }
    if out.ends_with('\n') { out } else { out + "\n" }
}

/// Pools and workers of one look.
type Looked = anyhow::Result<(Vec<Value>, Vec<Value>)>;

/// Runs the screen. An error of the first look ends the command; later looks are tried again, and the last figures
/// stay.
async fn watch(client: Client, args: &TopArgs) -> anyhow::Result<()> {
    let mut view = View::new(client.address(), args.every);
    let mut sums = Sums::default();
    let (pools, workers) = look(&client, &mut sums).await?;
    view.update(&pools, &workers);
    let (send, mut looks) = mpsc::channel::<Looked>(1);
    let every = Duration::from_secs_f64(args.every);
    let looking = tokio::spawn(async move {
        loop {
            tokio::time::sleep(every).await;
            if send.send(look(&client, &mut sums).await).await.is_err() {
                return;
            }
        }
    });
    // Signals and the screen: whoever sends one finds the terminal as it was.
    let (mut ends, mut interrupts) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut screen = ratatui::try_init()?;
    let mut keys = keys();
    let done = loop {
        if let Err(error) = screen.draw(|frame| draw::draw(frame, &mut view)) {
            break Err(error.into());
        }
        tokio::select! {
            biased;
            _ = ends.recv() => break Ok(()),
            _ = interrupts.recv() => break Ok(()),
            event = keys.recv() => match event {
                Some(Ok(event)) if view.on(&event) == Then::Leave => break Ok(()),
                Some(Ok(_)) => {}
                Some(Err(error)) => break Err(error.into()),
                None => break Ok(()),
            },
            Some(looked) = looks.recv() => match looked {
                Ok((pools, workers)) => view.update(&pools, &workers),
                Err(error) => view.failed(&format!("{error:#}")),
            },
        }
    };
    looking.abort();
    ratatui::restore();
    done
}

/// Events of the terminal, read on a thread of its own because reading blocks. The thread ends with the process.
fn keys() -> mpsc::Receiver<std::io::Result<event::Event>> {
    let (send, received) = mpsc::channel(KEYS_WAITING_MAX);
    std::thread::spawn(move || {
        loop {
            let event = event::read();
            let is_end = event.is_err();
            if send.blocking_send(event).is_err() || is_end {
                return;
            }
        }
    });
    received
}
