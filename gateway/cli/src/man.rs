//! `penstock man`: manual pages in roff, one per command, made from the command line that the program reads.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Command};
use clap_mangen::Man;

const EXAMPLES: &str = "\
Examples:
  penstock man | man -l -
  penstock man ~/.local/share/man/man1      one page per command: penstock.1, penstock-serve.1, penstock-admin-keys.1, …

Debian's package installs all of them: man penstock-serve.";

/// `penstock man`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ManArgs {
    /// Folder for the pages of all commands, made where it does not exist [default: print the page of penstock itself]
    folder: Option<PathBuf>,
}

/// Writes the pages of `command` and of all commands below it, or prints its own.
pub(crate) fn run(args: &ManArgs, command: Command) -> anyhow::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let Some(folder) = &args.folder else {
        print!("{}", page(&command)?);
        return Ok(());
    };
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let count = write(&command, folder)?;
    eprintln!("penstock: {count} pages in {}", folder.display());
    Ok(())
}

/// Writes the page of `command` and those of the commands below it; returns their number.
fn write(command: &Command, folder: &Path) -> anyhow::Result<usize> {
    let path = folder.join(format!("{}.1", name(command)));
    std::fs::write(&path, page(command)?).with_context(|| path.display().to_string())?;
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    below.map(|below| write(below, folder)).try_fold(1, |sum, count| Ok(sum + count?))
}

/// Name of a command's page: `penstock-admin-keys` for `penstock admin keys`.
fn name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

/// Text of one page in roff.
fn page(command: &Command) -> anyhow::Result<String> {
    // The title is the page's name, as `man` prints it in the head of the page.
    let title = name(command);
    let mut out = Vec::new();
    Man::new(command.clone()).title(title).manual("penstock").render(&mut out).context("a manual page")?;
    Ok(String::from_utf8(out)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_of_its_own_name() {
        let folder = std::env::temp_dir().join(format!("penstock-man-{}", std::process::id()));
        let args = ManArgs { folder: Some(folder.clone()) };
        run(&args, crate::command()).expect("pages");
        for (page, says) in [
            ("penstock.1", "penstock\\-serve(1)"),
            ("penstock-serve.1", "\\-\\-state\\-dir"),
            ("penstock-admin-config-apply.1", "penstock admin config apply"),
        ] {
            let text = std::fs::read_to_string(folder.join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
            assert!(text.contains(says), "{page}: {text}");
            assert!(text.lines().any(|line| line.starts_with(".TH ")), "{page} has no head");
        }
        assert!(!folder.join("penstock-help.1").exists(), "help is no command with a page");
        std::fs::remove_dir_all(&folder).expect("a folder");
    }
}
