//! `penstock chat`: a conversation with a model in the terminal, through the public API like any other client.
//!
//! ```text
//! terminal: prompt, edited by rustyline ─▶ answer as it comes, reasoning dim ─▶ prompt …      Ctrl-C stops the answer, Ctrl-D leaves
//! once:     PROMPT, or all of a piped stdin ─▶ the answer alone on stdout     exit status says whether it is complete
//! ```
//!
//! A stopped answer drops its connection, by which the gateway learns that the client has left. The text that was shown
//! stays in the conversation.

mod client;
mod lines;
mod screen;
mod sse;

use std::io::{self, IsTerminal, Read, Write};
use std::ops::ControlFlow;

use anyhow::{Context, bail};
use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};

use client::{Answer, Client, Delta, Message, Settings};
use lines::{Lines, Said};
use screen::Screen;

use crate::out::Out;

/// Largest prompt, in bytes; a longer one is refused before it is sent: the gateway's own default for a body.
const PROMPT_BYTES_MAX: u64 = 32 << 20;

/// Default name of the variable with the API key.
const KEY_ENV: &str = "PENSTOCK_API_KEY";

const HELP: &str = "/new forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer, Alt-Enter or \"\"\" begins another line";

/// Default address of the gateway.
const HERE: &str = "http://127.0.0.1:8080";

const IN_A_TERMINAL: &str = "\
In a terminal:
  Enter                sends the prompt; Alt-Enter begins another line, and so does Enter between two lines of \"\"\"
  Up, Down, Ctrl-R     earlier prompts, of earlier conversations too; one that begins with a space is not kept
  Left, Right, Ctrl-A, Ctrl-E, Ctrl-W, Ctrl-U, Ctrl-Y, …   as in a shell
  Ctrl-C               stops the answer; twice at the prompt, or Ctrl-D: leaves
  /new                 forgets the conversation

Earlier prompts are kept in ~/.local/state/penstock/chat_history (or in $XDG_STATE_HOME), the last 1,000, for their owner alone.";

/// What `penstock chat` is told.
#[derive(Args, Clone, Debug)]
#[command(after_help = IN_A_TERMINAL)]
pub(crate) struct ChatArgs {
    /// Prompt to answer once [default: what is piped in; in a terminal a conversation]
    #[arg(value_name = "PROMPT")]
    pub(crate) prompt: Option<String>,
    /// Base URL of the gateway; a path such as /v1 may follow [default: OPENAI_BASE_URL, else http://127.0.0.1:8080]
    #[arg(long, env = "PENSTOCK_URL")]
    pub(crate) url: Option<String>,
    /// Model to use [default: the first one that the gateway lists]
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// System prompt put in front of the conversation
    #[arg(long)]
    pub(crate) system: Option<String>,
    /// Environment variable that holds the API key, if the gateway asks for one; OPENAI_API_KEY is read too, for a gateway on this
    /// machine or at OPENAI_BASE_URL
    #[arg(long, value_name = "NAME", default_value = KEY_ENV)]
    pub(crate) key_env: String,
    /// Longest answer, in tokens
    #[arg(long, value_name = "COUNT")]
    pub(crate) max_tokens: Option<u32>,
    /// Randomness of the answer, 0 to 2; 0 always takes the likeliest token [default: the model's]
    #[arg(long, value_name = "NUMBER")]
    pub(crate) temperature: Option<f32>,
}

/// Runs the conversation until the input ends.
///
/// Errors: the gateway cannot be reached or refuses; where one prompt is answered also an answer that broke off.
pub(crate) fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
    let (stdin, screen) = (io::stdin(), Screen::new(Out, io::stdout().is_terminal()));
    match &args.prompt {
        Some(prompt) => runtime.block_on(answer_one(args, prompt.as_bytes(), screen)),
        None if stdin.is_terminal() => runtime.block_on(converse(args, screen)),
        None => runtime.block_on(answer_one(args, stdin.lock(), screen)),
    }
}

/// One prompt, one answer.
async fn answer_one<W: Write>(args: &ChatArgs, input: impl Read, mut screen: Screen<W>) -> anyhow::Result<()> {
    let mut prompt = String::new();
    input.take(PROMPT_BYTES_MAX + 1).read_to_string(&mut prompt).context("the prompt is not text")?;
    if prompt.len() as u64 > PROMPT_BYTES_MAX {
        bail!("the prompt is longer than {PROMPT_BYTES_MAX} bytes");
    }
    if prompt.trim().is_empty() {
        bail!("there is no prompt: it is empty");
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

/// Terminal mode: turn by turn.
async fn converse<W: Write>(args: &ChatArgs, mut screen: Screen<W>) -> anyhow::Result<()> {
    let client = connect(args).await?;
    // One listener for the whole conversation: Ctrl-C may come between two waits for it.
    let mut interrupts = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    screen.note(&format!("{} at {}. {HELP}", client.model(), gateway(args, &variable).url))?;
    let mut lines = Lines::start(lines::history_path());
    let mut messages = opening(args);
    let mut leaves = false;
    loop {
        let line = match lines.next(&mut interrupts).await? {
            Said::End => break,
            Said::Interrupted if leaves => break,
            Said::Interrupted => {
                leaves = true;
                screen.note("Ctrl-C again or Ctrl-D to leave")?;
                continue;
            }
            Said::Line(line) => line,
        };
        leaves = false;
        if let Some(trouble) = lines.trouble() {
            screen.note(&trouble)?;
        }
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
            // Ctrl-C is polled first: an answer may come as fast as it is shown.
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
    let Gateway { url, key } = gateway(args, &variable);
    let settings = Settings { max_completion_tokens: args.max_tokens, temperature: args.temperature };
    Client::connect(&url, key, args.model.clone(), settings).await
}

/// Value of an environment variable.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Address of the gateway, and the key to send there.
#[derive(Debug, PartialEq, Eq)]
struct Gateway {
    url: String,
    key: Option<String>,
}

/// Gateway that options and variables name.
///
/// Programs that use OpenAI's libraries have its address in `OPENAI_BASE_URL` and their key in `OPENAI_API_KEY`. That
/// key is sent only to that address and to this machine, because it may be one of OpenAI's. No other key is sent to
/// that address, which may be OpenAI's, unless its variable was named.
fn gateway(args: &ChatArgs, env: &dyn Fn(&str) -> Option<String>) -> Gateway {
    let of = |name: &str| env(name).filter(|value| !value.is_empty());
    let usual = if args.url.is_none() { of("OPENAI_BASE_URL") } else { None };
    let is_usual = usual.is_some();
    let url = args.url.clone().or(usual).unwrap_or_else(|| HERE.to_owned());
    let names: &[&str] = match (args.key_env == KEY_ENV, is_here(&url), is_usual) {
        (true, true, _) => &[KEY_ENV, "OPENAI_API_KEY"],
        (true, false, true) => &["OPENAI_API_KEY"],
        (_, _, _) => &[&args.key_env],
    };
    Gateway { key: names.iter().find_map(|name| of(name)), url }
}

/// Whether `url` points to this machine.
fn is_here(url: &str) -> bool {
    let url: Option<hyper::Uri> = url.parse().ok();
    let host = url.as_ref().and_then(|url| url.host()).unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

fn opening(args: &ChatArgs) -> Vec<Message> {
    args.system.iter().map(|system| Message::system(system)).collect()
}

#[cfg(test)]
mod tests;
