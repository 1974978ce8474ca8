//! `penstock chat`: talk to a model in the terminal, through the public API like any other client.
//!
//! ```text
//! terminal: prompt ─▶ answer as it comes, reasoning dim ─▶ prompt …      Ctrl-C stops the answer, Ctrl-D leaves
//! piped:    all of stdin is one prompt ─▶ the answer alone on stdout     exit status says whether it is complete
//! ```
//!
//! A stopped answer drops its connection, which is how the gateway learns that nobody listens. What was shown stays in the
//! conversation.

mod client;
mod screen;
mod sse;

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::ops::ControlFlow;

use anyhow::{Context, bail};
use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};

use client::{Answer, Client, Delta, Message};
use screen::Screen;

/// Prompts longer than this are refused before they are sent: the gateway's own default for a body.
const PROMPT_BYTES_MAX: u64 = 32 << 20;

/// Where the API key is, without another word.
const KEY_ENV: &str = "PENSTOCK_API_KEY";

const HELP: &str = "/new forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer";

/// What `penstock chat` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct ChatArgs {
    /// Where the gateway is; a path such as /v1 may follow
    #[arg(long, default_value = "http://127.0.0.1:8080", env = "PENSTOCK_URL")]
    pub(crate) url: String,
    /// Model to talk to; without it, the first one that the gateway lists
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// Instructions put in front of the conversation
    #[arg(long)]
    pub(crate) system: Option<String>,
    /// Environment variable that holds the API key, if the gateway asks for one; on this machine OPENAI_API_KEY is read too
    #[arg(long, value_name = "NAME", default_value = KEY_ENV)]
    pub(crate) key_env: String,
    /// Longest answer, in tokens
    #[arg(long, value_name = "COUNT")]
    pub(crate) max_tokens: Option<u32>,
}

/// Talks until the input ends.
///
/// Errors: the gateway cannot be reached or refuses; in piped mode also an answer that broke off.
pub(crate) fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
    let stdin = io::stdin();
    if stdin.is_terminal() {
        runtime.block_on(converse(args, Screen::new(io::stdout(), io::stdout().is_terminal())))
    } else {
        runtime.block_on(answer_one(args, stdin.lock(), Screen::new(io::stdout(), io::stdout().is_terminal())))
    }
}

/// Piped: one prompt, one answer.
async fn answer_one<W: Write>(args: &ChatArgs, input: impl Read, mut screen: Screen<W>) -> anyhow::Result<()> {
    let mut prompt = String::new();
    input.take(PROMPT_BYTES_MAX + 1).read_to_string(&mut prompt).context("the prompt on stdin is not text")?;
    if prompt.len() as u64 > PROMPT_BYTES_MAX {
        bail!("the prompt on stdin is longer than {PROMPT_BYTES_MAX} bytes");
    }
    if prompt.trim().is_empty() {
        bail!("there is no prompt: stdin is empty");
    }
    let client = connect(args).await?;
    let mut messages = opening(args);
    messages.push(Message::user(prompt.trim_end_matches('\n')));
    let mut answer = client.ask(&messages).await?;
    while let Some(delta) = answer.next().await? {
        screen.show(&delta)?;
    }
    screen.end_answer()?;
    Ok(())
}

/// In a terminal: turn by turn.
async fn converse<W: Write>(args: &ChatArgs, mut screen: Screen<W>) -> anyhow::Result<()> {
    let client = connect(args).await?;
    // One listener for the whole conversation: Ctrl-C may come between two waits for it.
    let mut interrupts = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    screen.note(&format!("{} at {}. {HELP}", client.model(), args.url))?;
    let mut lines = Lines::start();
    let mut messages = opening(args);
    loop {
        screen.prompt()?;
        let Some(line) = lines.next(&mut interrupts, &mut screen).await? else { break };
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => break,
            "/new" => messages = opening(args),
            command if command.starts_with('/') => screen.note(HELP)?,
            prompt => {
                messages.push(Message::user(prompt));
                match turn(&client, &messages, &mut interrupts, &mut screen).await {
                    Ok(text) => messages.push(Message::assistant(text)),
                    Err(error) => {
                        messages.pop();
                        screen.note(&format!("{error:#}"))?;
                    }
                }
            }
        }
    }
    screen.end_answer()?;
    Ok(())
}

/// Shows one answer and returns its text; Ctrl-C ends it early.
async fn turn<W: Write>(
    client: &Client,
    messages: &[Message],
    interrupts: &mut Signal,
    screen: &mut Screen<W>,
) -> anyhow::Result<String> {
    let mut text = String::new();
    let mut answer: Option<Answer> = None;
    loop {
        // Cancel-safe: a pending `ask` or `next` that loses the race is dropped for good together with its connection.
        let step = async {
            match &mut answer {
                None => Ok(ControlFlow::Continue(Some(client.ask(messages).await?))),
                Some(answer) => Ok::<_, anyhow::Error>(match answer.next().await? {
                    Some(delta) => {
                        screen.show(&delta)?;
                        if let Delta::Text(piece) = &delta {
                            text.push_str(piece);
                        }
                        ControlFlow::Continue(None)
                    }
                    None => ControlFlow::Break(()),
                }),
            }
        };
        tokio::select! {
            // Who asks to stop goes before an answer that comes as fast as it is shown.
            biased;
            _ = interrupts.recv() => {
                drop(answer);
                screen.end_answer()?;
                screen.note("stopped")?;
                return Ok(text);
            }
            done = step => match done? {
                ControlFlow::Continue(Some(begun)) => answer = Some(begun),
                ControlFlow::Continue(None) => {}
                ControlFlow::Break(()) => break,
            },
        }
    }
    screen.end_answer()?;
    Ok(text)
}

async fn connect(args: &ChatArgs) -> anyhow::Result<Client> {
    let key = key(args, &|name| std::env::var(name).ok());
    Client::connect(&args.url, key, args.model.clone(), args.max_tokens).await
}

/// The key to send. Programs that use OpenAI's libraries have theirs in `OPENAI_API_KEY`; it is sent to this machine alone, because it may
/// be one of OpenAI's.
fn key(args: &ChatArgs, env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let of = |name: &str| env(name).filter(|key| !key.is_empty());
    let url: Option<hyper::Uri> = args.url.parse().ok();
    let host = url.as_ref().and_then(|url| url.host()).unwrap_or_default().trim_matches(['[', ']']);
    let is_here = host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
    let usual = || (is_here && args.key_env == KEY_ENV).then(|| of("OPENAI_API_KEY")).flatten();
    of(&args.key_env).or_else(usual)
}

fn opening(args: &ChatArgs) -> Vec<Message> {
    args.system.iter().map(|system| Message::system(system)).collect()
}

/// Lines of the terminal, read on a thread of their own because reading one blocks.
struct Lines {
    received: tokio::sync::mpsc::Receiver<io::Result<String>>,
}

impl Lines {
    fn start() -> Self {
        // One line: whoever types ahead waits in the terminal's own buffer.
        let (send, received) = tokio::sync::mpsc::channel(1);
        std::thread::spawn(move || {
            for line in io::stdin().lock().lines() {
                if send.blocking_send(line).is_err() {
                    break;
                }
            }
        });
        Self { received }
    }

    /// The next line; `None` at the end of input, or after Ctrl-C twice in a row.
    async fn next<W: Write>(
        &mut self,
        interrupts: &mut Signal,
        screen: &mut Screen<W>,
    ) -> anyhow::Result<Option<String>> {
        let mut interrupted = false;
        loop {
            tokio::select! {
                line = self.received.recv() => return line.transpose().context("cannot read the terminal"),
                _ = interrupts.recv() => {
                    if interrupted {
                        return Ok(None);
                    }
                    interrupted = true;
                    screen.note("Ctrl-C again or Ctrl-D to leave")?;
                    screen.prompt()?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
