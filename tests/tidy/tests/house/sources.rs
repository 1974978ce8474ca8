//! Rules for the contents of source files.

use penstock_tidy::graph::Graph;
use penstock_tidy::none;
use penstock_tidy::source::Source;

/// Most lines of a program file; a longer one has more than one subject. A flat table may be longer, with its reason
/// in [`LONG`].
const LINES_MAX: usize = 900;

/// Files that may be longer, with the reason.
const LONG: [(&str, &str); 0] = [];

/// Folders whose files may hold `unsafe`.
const UNSAFE_HOMES: [&str; 3] = ["kernels/", "backends/shm/", "gateway/allocator/"];

/// Folders below the processes: time is an argument there.
const TIMELESS: [&str; 11] = [
    "backends/proto/src",
    "backends/kv/src",
    "backends/engine/src",
    "gateway/dialects/src",
    "gateway/text/src",
    "gateway/router/src",
    "gateway/govern/src",
    "plugins/api/src",
    "plugins/builtin/src",
    "plugins/wasm/src",
    "sim/src",
];

#[test]
fn unsafe_is_forbidden_outside_its_homes() {
    let graph = Graph::load();
    let mut faults = Vec::new();
    for member in graph.members() {
        let folder = graph.folder(member);
        if UNSAFE_HOMES.iter().any(|home| format!("{folder}/").starts_with(home)) {
            continue;
        }
        let tops = ["src/lib.rs", "src/main.rs"].map(|top| format!("{folder}/{top}"));
        for top in tops.iter().filter(|top| penstock_tidy::root().join(top).is_file()) {
            let text = penstock_tidy::read(top);
            if !text.contains("#![forbid(unsafe_code)]") {
                faults.push(top.clone());
            }
        }
    }
    none("crates without #![forbid(unsafe_code)] on top", &faults);
}

#[test]
fn unsafe_stays_at_home_and_says_why() {
    let mut faults = Vec::new();
    for source in Source::all().iter().filter(|source| !source.path.starts_with("tests/tidy/")) {
        let at_home = UNSAFE_HOMES.iter().any(|home| source.path.starts_with(home));
        for (number, code) in source.code().filter(|(_, code)| has_word(code, "unsafe")) {
            let place = format!("{}:{number}: {}", source.path, code.trim());
            if !at_home {
                faults.push(format!("{place} (outside the homes of unsafe)"));
            } else if (code.contains("unsafe {") || code.contains("unsafe impl")) && !says_safety(source, number) {
                faults.push(format!("{place} (no SAFETY comment)"));
            }
        }
    }
    none("unsafe that is in the wrong place or does not say why", &faults);
}

/// Returns true if a `SAFETY:` comment stands at most ten lines above, which is where a multi-line statement can begin.
fn says_safety(source: &Source, number: usize) -> bool {
    source.lines[number.saturating_sub(11)..number].iter().any(|line| line.contains("SAFETY:"))
}

#[test]
fn cuda_is_called_in_one_module() {
    // The driver's module, the one call of a function that a driver may lack, and the compiler's in a program that the product does not link.
    // cudarc panics where a library is missing.
    let homes = ["kernels/src/cuda/driver.rs", "kernels/src/cuda/probe/identity.rs", "kernels/kernelc/src/nvrtc.rs"];
    let mut faults = Vec::new();
    for source in Source::all().iter().filter(|source| !homes.contains(&source.path.as_str())) {
        for (number, code) in source.code().filter(|(_, code)| has_word(code, "cudarc")) {
            faults.push(format!("{}:{number}: {}", source.path, code.trim()));
        }
    }
    none("uses of cudarc outside of its module", &faults);
}

#[test]
fn kernels_need_no_headers_and_have_no_assembler() {
    let mut faults = Vec::new();
    // Headers of kernels lie beside them; `ptx.cuh` alone differs between a GPU and the host.
    let is_kernel = |path: &&String| path.ends_with(".cu") || (path.ends_with(".cuh") && !path.ends_with("ptx.cuh"));
    for path in penstock_tidy::tracked().iter().filter(is_kernel) {
        for (index, line) in penstock_tidy::read(path).lines().enumerate() {
            let own = ["\"ptx.cuh\"", "\"gemm.cuh\"", "\"attention.cuh\""];
            let is_own = own.iter().any(|own| line.trim().strip_prefix("#include ") == Some(own));
            let includes = line.trim_start().starts_with("#include") && !is_own;
            if includes || has_word(line, "asm") {
                faults.push(format!("{path}:{}: {}", index + 1, line.trim()));
            }
        }
    }
    none("kernels with PTX or headers of a toolkit: ptx.cuh has the PTX, with a twin for the host", &faults);
}

#[test]
fn unsafe_functions_have_a_contract() {
    let mut faults = Vec::new();
    for source in Source::all().iter().filter(|source| !source.path.starts_with("tests/tidy/")) {
        for (number, code) in source.code() {
            // A macro's functions share the contract that stands above the macro.
            let declares = code.contains("unsafe fn ") && !code.contains("unsafe fn $") && code.contains('(');
            if declares && !source.above(number).to_lowercase().contains("safety") {
                faults.push(format!("{}:{number}: {}", source.path, code.trim()));
            }
        }
    }
    none("unsafe functions without a # Safety section", &faults);
}

#[test]
fn nothing_is_left_for_later() {
    let marks = ["todo!", "unimplemented!", "dbg!"];
    let mut faults = Vec::new();
    for source in Source::all().iter().filter(|source| !source.path.starts_with("tests/tidy/")) {
        for (number, code) in source.code().filter(|(_, code)| marks.iter().any(|mark| code.contains(mark))) {
            faults.push(format!("{}:{number}: {}", source.path, code.trim()));
        }
        let ignored = source.lines.iter().position(|line| line.trim_start().starts_with("#[ignore"));
        faults.extend(ignored.map(|index| format!("{}:{}: an ignored test", source.path, index + 1)));
    }
    none("unfinished code", &faults);
}

#[test]
fn time_is_an_argument_below_the_processes() {
    let clocks = ["Instant::now", "SystemTime::now", "thread::sleep", ".elapsed()"];
    let mut faults = Vec::new();
    for source in Source::all().iter().filter(|source| TIMELESS.iter().any(|folder| source.path.starts_with(folder))) {
        for (number, code) in source.code().filter(|(_, code)| clocks.iter().any(|clock| code.contains(clock))) {
            faults.push(format!("{}:{number}: {}", source.path, code.trim()));
        }
    }
    none("clocks in pure crates", &faults);
}

#[test]
fn randomness_is_an_argument_below_the_processes() {
    let sources = ["getrandom", "thread_rng", "rand::rng(", "RandomState::new"];
    let mut faults = Vec::new();
    for source in Source::all().iter().filter(|source| TIMELESS.iter().any(|folder| source.path.starts_with(folder))) {
        for (number, code) in source.code().filter(|(_, code)| sources.iter().any(|name| code.contains(name))) {
            faults.push(format!("{}:{number}: {}", source.path, code.trim()));
        }
    }
    none("randomness in pure crates", &faults);
}

#[test]
fn wall_clock_is_read_in_few_places() {
    let mut files: Vec<String> = Vec::new();
    for source in Source::all().iter().filter(|source| !source.is_test()) {
        if source.code().any(|(_, code)| code.contains("SystemTime::now")) {
            files.push(source.path.clone());
        }
    }
    let outside: Vec<String> = files.into_iter().filter(|path| !path.ends_with("/clock.rs")).collect();
    none("the wall clock is read outside a clock.rs", &outside);
}

#[test]
fn files_are_of_readable_length() {
    let mut faults = Vec::new();
    for source in Source::all().iter().filter(|source| !source.is_test()) {
        let lines = source.program_lines();
        let excused = LONG.iter().any(|(path, _)| *path == source.path);
        if lines > LINES_MAX && !excused {
            faults.push(format!("{}: {lines} lines without its tests, {LINES_MAX} at most", source.path));
        } else if lines > 700 {
            println!("look again: {} has {lines} lines without its tests", source.path);
        }
    }
    none("files too long to read", &faults);
}

#[test]
fn modules_begin_with_what_they_are_for() {
    let mut faults = Vec::new();
    for source in Source::all().iter().filter(|source| !source.is_test()) {
        if !source.lines.iter().take(5).any(|line| line.starts_with("//!")) {
            faults.push(source.path.clone());
        }
    }
    none("files without a header", &faults);
}

/// Returns true if `word` occurs in `code` with no letter, digit or underscore beside it.
fn has_word(code: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        !code[..at].chars().next_back().is_some_and(part) && !code[at + word.len()..].chars().next().is_some_and(part)
    })
}
