//! Pages for a browser that commands write as one file: no scripts, nothing loaded from elsewhere, light and dark.

use std::fmt::{Display, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::chart::{Bar, cut, most, number, share};

/// Width of the longest bar and of the place behind it, height of a row, width of a character of a label, in pixels.
const BAR: f64 = 420.0;
const BEHIND: usize = 140;
const ROW: usize = 34;
const CHARACTER: usize = 8;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--back:#fff;\
--p0:#0969da;--p1:#bc4c00;--p2:#1a7f37;--p3:#8250df;--p4:#bf3989;--p5:#9a6700;--p6:#57606a}\
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--back:#0d1117;\
--p0:#4493f8;--p1:#f0883e;--p2:#3fb950;--p3:#ab7df8;--p4:#db61a2;--p5:#d29922;--p6:#9198a1}}\
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:46rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}div{overflow-x:auto}\
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:500}\
.n{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}\
text{fill:var(--ink);font:14px system-ui,sans-serif}\
.p0{fill:var(--p0);color:var(--p0)}.p1{fill:var(--p1);color:var(--p1)}.p2{fill:var(--p2);color:var(--p2)}.p3{fill:var(--p3);color:var(--p3)}\
.p4{fill:var(--p4);color:var(--p4)}.p5{fill:var(--p5);color:var(--p5)}.p6{fill:var(--p6);color:var(--p6)}";

/// Number of colours of parts.
const COLOURS: usize = 7;

/// Column of a table: its heading, and whether it holds numbers.
pub(crate) type Column<'a> = (&'a str, bool);

/// Page that is being written. Every text that is given to it is escaped.
pub(crate) struct Page {
    out: String,
}

impl Page {
    /// Page with a title and a table of facts, to which the program's version is added.
    pub(crate) fn new(title: &str, facts: &[(&str, String)]) -> Self {
        let title = Escaped(title);
        let mut out = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n\
             <meta name=\"viewport\" content=\"width=device-width\"><meta http-equiv=\"Content-Security-Policy\" \
             content=\"default-src 'none'; style-src 'nonce-page'\">\n<style nonce=\"page\">{STYLE}</style></head><body>\n<h1>{title}</h1>\n<table>\n"
        );
        let version = ("penstock", env!("CARGO_PKG_VERSION").to_owned());
        for (name, text) in facts.iter().chain([&version]) {
            let _ = writeln!(out, "<tr><th scope=\"row\">{}</th><td>{}</td></tr>", Escaped(name), Escaped(text));
        }
        out += "</table>\n";
        Self { out }
    }

    pub(crate) fn heading(&mut self, text: &str) {
        let _ = writeln!(self.out, "<h2>{}</h2>", Escaped(text));
    }

    pub(crate) fn text(&mut self, text: &str) {
        let _ = writeln!(self.out, "<p>{}</p>", Escaped(text));
    }

    /// Chart of bars; `label` says what they show to those who do not see it. `legend`: names of the parts, if the bars have some.
    pub(crate) fn bars(&mut self, label: &str, legend: &[&str], bars: &[Bar]) {
        let out = &mut self.out;
        let chars = bars.iter().map(|bar| cut(&bar.label).chars().count()).max().unwrap_or(0);
        let (left, most) = ((chars * CHARACTER + 20).max(80), most(bars));
        let (width, height) = (left + BAR as usize + BEHIND, bars.len() * ROW);
        let label = Escaped(label);
        let _ = writeln!(out, "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label}\">");
        for (at, bar) in bars.iter().enumerate() {
            let (top, middle, name) = (at * ROW + 5, at * ROW + 22, cut(&bar.label));
            let _ =
                write!(out, "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">{}</text>", left - 10, Escaped(&name));
            let whole = [bar.value];
            let parts = if bar.parts.is_empty() { &whole[..] } else { &bar.parts };
            let (mut x, height) = (left as f64, ROW - 10);
            for (part, value) in parts.iter().enumerate() {
                // The shortest bar is seen; of parts, none that is nothing.
                let least = if bar.parts.is_empty() { 1.0 } else { 0.0 };
                let width = (BAR * share(*value, most)).max(least);
                if width > 0.0 {
                    let colour = part % COLOURS;
                    let _ = write!(
                        out,
                        "<rect class=\"p{colour}\" x=\"{x:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{height}\"/>"
                    );
                }
                x += width;
            }
            let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{middle}\">{}</text>", x + 10.0, number(bar.value));
        }
        *out += "</svg>\n";
        if !legend.is_empty() {
            let one =
                |(at, name): (usize, &&str)| format!("<span class=\"p{}\">■</span> {}", at % COLOURS, Escaped(name));
            let _ = writeln!(out, "<p>{}</p>", legend.iter().enumerate().map(one).collect::<Vec<_>>().join(" · "));
        }
    }

    pub(crate) fn table(&mut self, columns: &[Column<'_>], rows: impl IntoIterator<Item = Vec<String>>) {
        let class = |is_number: bool| if is_number { " class=\"n\"" } else { "" };
        self.out += "<div><table><tr>";
        for (head, is_number) in columns {
            let _ = write!(self.out, "<th scope=\"col\"{}>{}</th>", class(*is_number), Escaped(head));
        }
        self.out += "</tr>\n";
        for row in rows {
            self.out += "<tr>";
            for ((_, is_number), cell) in columns.iter().zip(&row) {
                let _ = write!(self.out, "<td{}>{}</td>", class(*is_number), Escaped(cell));
            }
            self.out += "</tr>\n";
        }
        self.out += "</table></div>\n";
    }

    /// Text of the whole page.
    pub(crate) fn finish(mut self) -> String {
        self.out += "</body></html>\n";
        self.out
    }
}

/// Text without characters that mean something in HTML.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '&' => out.write_str("&amp;"),
            '<' => out.write_str("&lt;"),
            '>' => out.write_str("&gt;"),
            '"' => out.write_str("&quot;"),
            '\'' => out.write_str("&#39;"),
            c => out.write_char(c),
        })
    }
}

/// File of a page, opened before the work whose result it gets, so that a path that cannot be written is told at once. Until there is a
/// result, an older page stays what it is; without a result, a new file goes.
pub(crate) struct PageFile {
    path: PathBuf,
    file: File,
    /// True if the file is new and still empty.
    is_blank: bool,
}

impl PageFile {
    /// Opens the file, if one is wanted.
    pub(crate) fn open(path: Option<&Path>) -> anyhow::Result<Option<Self>> {
        let open = |path: &Path| -> anyhow::Result<Self> {
            let is_blank = std::fs::symlink_metadata(path).is_err();
            let file = File::options().write(true).create(true).truncate(false).open(path);
            let file = file.with_context(|| format!("{}: the page cannot be written", path.display()))?;
            Ok(Self { path: path.to_owned(), file, is_blank })
        };
        path.map(open).transpose()
    }

    /// Writes the page, and says where it is unless `is_quiet`.
    pub(crate) fn write(mut self, page: Page, is_quiet: bool) -> anyhow::Result<()> {
        self.is_blank = false;
        // What is no file, such as a pipe, has no length.
        if self.file.metadata().context("writing the page")?.is_file() {
            self.file.set_len(0).context("writing the page")?;
        }
        self.file.write_all(page.finish().as_bytes()).context("writing the page")?;
        if !is_quiet {
            println!("\npage: {}", self.path.display());
        }
        Ok(())
    }
}

impl Drop for PageFile {
    fn drop(&mut self) {
        if self.is_blank {
            // Failing that, an empty file stays.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Asserts that a page has these parts, asks for nothing from anywhere and runs nothing.
#[cfg(test)]
#[track_caller]
pub(crate) fn assert_alone(page: &str, parts: &[&str]) {
    for part in parts {
        assert!(page.contains(part), "{part} is not in {page}");
    }
    for part in ["<script", "<img", "http://", "https://", "src=", "href=", "url(", "unsafe", "onerror"] {
        assert!(!page.contains(part), "{part} is in {page}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_elsewhere_is_text_wherever_it_stands() {
        let bad = "\"><img src=x onerror='a'>&";
        let mut page = Page::new(bad, &[(bad, bad.to_owned())]);
        page.heading(bad);
        page.text(bad);
        page.bars(bad, &[bad], &[Bar::new(bad, 1.0)]);
        page.table(&[(bad, false)], [vec![bad.to_owned()]]);
        let page = page.finish();
        assert_alone(
            &page.replace("src=x", "").replace("onerror=", ""),
            &["&quot;&gt;&lt;img", "&#39;a&#39;&gt;&amp;"],
        );
        assert_eq!(page.matches('"').count() % 2, 0);
    }

    #[test]
    fn an_older_page_stays_until_there_is_another() {
        let path = std::env::temp_dir().join(format!("penstock-page-{}.html", std::process::id()));
        let open = || PageFile::open(Some(&path)).expect("it can be written").expect("it is wanted");
        drop(open());
        assert!(!path.exists(), "work without a result leaves nothing");
        let older = Page::new("a page that is longer than the next one", &[]);
        open().write(older, true).expect("written");
        let before = std::fs::read(&path).expect("there");
        drop(open());
        assert_eq!(std::fs::read(&path).expect("there"), before);
        open().write(Page::new("new", &[]), true).expect("written");
        assert_eq!(std::fs::read_to_string(&path).expect("there"), Page::new("new", &[]).finish());
        std::fs::remove_file(&path).expect("removed");
    }

    #[test]
    fn bars_are_as_long_as_their_values_and_parts_stand_in_a_row() {
        let parts = |label: &str, parts: &[f64]| Bar { parts: parts.to_vec(), ..Bar::new(label, parts.iter().sum()) };
        let mut page = Page::new("t", &[]);
        page.bars("x", &[], &[Bar::new("a", 4.0), Bar::new("b", 1.0), Bar::new("c", f64::INFINITY)]);
        page.bars("y", &["one", "two", "three"], &[parts("d", &[1.0, 0.0, 3.0])]);
        let page = page.finish();
        let widths: Vec<&str> =
            page.split(" width=\"").skip(1).map(|rest| rest.split('"').next().expect("some")).collect();
        assert_eq!(widths, ["420.0", "105.0", "1.0", "105.0", "315.0"]);
        let all =
            ["class=\"p0\" x=\"80.0\"", "class=\"p2\" x=\"185.0\"", ">never</text>", "■</span> three", "x=\"510.0\""];
        assert_alone(&page, &all);
    }
}
