//! `penstock completions`: completion scripts for shells, made from the command line that the program reads.

use clap::{Args, Command};
use clap_complete::{Shell, generate};

const EXAMPLES: &str = "\
Examples:
  penstock completions bash > ~/.local/share/bash-completion/completions/penstock
  penstock completions zsh > ~/.zfunc/_penstock          with fpath+=~/.zfunc before compinit
  penstock completions fish > ~/.config/fish/completions/penstock.fish

Debian's package installs those of bash, zsh and fish.";

/// `penstock completions`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompletionsArgs {
    /// Shell that reads the script
    shell: Shell,
}

/// Prints the script that completes `command` in the chosen shell.
pub(crate) fn run(args: &CompletionsArgs, mut command: Command) {
    print!("{}", script(args.shell, &mut command));
}

fn script(shell: Shell, command: &mut Command) -> String {
    let mut out = Vec::new();
    generate(shell, command, "penstock", &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_shell_completes_every_command() {
        for shell in Shell::value_variants() {
            let mut command = crate::command();
            let text = script(*shell, &mut command);
            for below in command.get_subcommands() {
                assert!(text.contains(below.get_name()), "{shell}: {}", below.get_name());
            }
            assert!(text.contains("state-dir"), "{shell}: options");
        }
    }
}
