//! Progress display while the workers load, and the banner when they are ready.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use penstock_config::{PoolConfig, Snapshot};
use penstock_pool::{PoolStatus, WorkerPhase};
use penstock_proxy::fleet::Fleet;

/// Polling interval of the pools' state.
const TICK: Duration = Duration::from_millis(100);

/// Handle of the display, which ends on drop.
pub(crate) struct Shown {
    over: Arc<AtomicBool>,
    /// Flag that is set when connections are accepted.
    pub(crate) accepting: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Shows loading on a terminal, and prints the banner once every pool is ready and connections are accepted. `console`: where the
/// web console is, if there is one.
pub(crate) fn show(fleet: Arc<Fleet>, config: &Snapshot, console: Option<&str>) -> anyhow::Result<Shown> {
    let (over, accepting) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let (stop, open, banner, config) = (over.clone(), accepting.clone(), banner(config, console), config.clone());
    let thread = std::thread::Builder::new()
        .name("penstock-progress".into())
        .spawn(move || watch(&fleet, &config, &banner, (&open, &stop)))
        .context("a thread for the progress display")?;
    Ok(Shown { over, accepting, thread: Some(thread) })
}

fn watch(fleet: &Fleet, config: &Snapshot, banner: &str, (accepting, over): (&AtomicBool, &AtomicBool)) {
    let target =
        if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(0), target);
    let style = ProgressStyle::with_template("{msg:30!} [{wide_bar}] {bytes}/{total_bytes} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut said_down = String::new();
    while !over.load(Ordering::Relaxed) {
        let statuses: Vec<_> = fleet.pools().into_iter().map(|(id, pool)| (id, pool.status())).collect();
        if statuses.iter().all(|(_, status)| status.takes_requests()) && accepting.load(Ordering::Relaxed) {
            bar.finish_and_clear();
            if !config.log_level.contains("error") {
                say(banner);
            }
            return;
        }
        let waiting = statuses.iter().find(|(_, status)| !status.takes_requests());
        if let Some((id, status)) = waiting {
            draw(&bar, id, status);
            if let Some(why) = down(status).filter(|why| *why != said_down) {
                bar.suspend(|| say(&format!("penstock: pool {id}: {why}; trying again")));
                said_down = why;
            }
        }
        std::thread::park_timeout(TICK);
    }
}

fn draw(bar: &ProgressBar, id: &str, status: &PoolStatus) {
    let (mut done, mut total, mut stage) = (0, 0, "starting".to_owned());
    for worker in &status.workers {
        if let WorkerPhase::Loading { stage: now, bytes_done, bytes_total } = &worker.phase {
            done += bytes_done;
            total += bytes_total;
            stage.clone_from(now);
        }
    }
    bar.set_length(total);
    bar.set_position(done);
    bar.set_message(format!("{id}: {stage}"));
}

fn down(status: &PoolStatus) -> Option<String> {
    status.workers.iter().find_map(|worker| match &worker.phase {
        WorkerPhase::Down { why, .. } => Some(format!("{} {why}", worker.name)),
        _ => None,
    })
}

/// Banner: address, models, a command to paste, and where to look.
fn banner(config: &Snapshot, console: Option<&str>) -> String {
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let mut address = config.listen;
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() { [127, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() });
    }
    let own = config.pools.iter().flat_map(PoolConfig::served);
    let models: Vec<_> =
        own.chain(config.providers.iter().flat_map(|one| one.models.iter().map(String::as_str))).collect();
    // Providers may be there for what they are found to have, or for routes only.
    let served = if models.is_empty() { "what its providers have".to_owned() } else { models.join(", ") };
    let key = if config.auth_settings().is_open_so_far() { "" } else { " -H \"authorization: Bearer $KEY\"" };
    let console = console.map(|place| format!("\n  web console: {place}\n"));
    format!(
        "\npenstock serves {} at {scheme}://{address}/v1\n\n  curl -N {scheme}://{address}/v1/chat/completions{key} -H 'content-type: application/json' \\\n    \
         -d '{{\"model\": \"{}\", \"stream\": true, \"messages\": [{{\"role\": \"user\", \"content\": \"Hello\"}}]}}'\n",
        served,
        models.first().unwrap_or(&"MODEL"),
    ) + &console.unwrap_or_default()
}

/// Writes a line on standard error; an error of that is ignored.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
