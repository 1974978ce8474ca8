//! The CUDA kernels on the host model against float64, and with planted bugs, which have to be found.

use std::path::PathBuf;
use std::process::{Command, Output};

/// Builds and runs the checks: all of them, or, with a planted bug, those of the broken operation up to the first that fails.
fn run(planted: Option<(&str, &str)>) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/host/build.sh");
    let mut build = Command::new(script);
    build.args([env!("CARGO_TARGET_TMPDIR"), "check"]).args(planted.map(|(name, _)| format!("-D{name}")));
    let built = build.output().expect("sh and a C++ compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let path = PathBuf::from(String::from_utf8(built.stdout).expect("a path").trim());
    Command::new(path).args(planted.map(|(_, broken)| broken)).output().expect("it starts")
}

#[test]
fn every_kernel_agrees_with_float64() {
    let output = run(None);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let tiles = ["8", "8_tall", "64", "128", "wide_64", "wide_128", "fed_256"];
    let products = ["store", "add", "silu"].into_iter().flat_map(|end| tiles.map(|tile| format!("gemm_{end}_{tile} ")));
    let chunked = ["store", "add"].into_iter().flat_map(|end| {
        ["8", "32", "128", "wide_64", "wide_tall", "wide_large"].map(|tile| format!("gemm_{end}_chunks_{tile} "))
    });
    let attention = ["finish_heads", "attention ", "attention_decode", "attention_prefill", "attention_grouped"];
    let sampling = ["best_parts", "best_tokens", "draw_sums", "draw_tokens"];
    let others = ["embed", "select_rows", "rmsnorm"].into_iter().chain(attention).chain(sampling);
    for kernel in products.chain(chunked).chain(others.map(str::to_owned)) {
        assert!(text.lines().any(|line| line.starts_with(&kernel)), "{kernel} is not checked:\n{text}");
    }
}

/// Bugs that the sources know by these names, each with the operation that it breaks, have to be found.
fn are_found(plants: &[(&str, &str)]) {
    for (plant, broken) in plants {
        let output = run(Some((plant, broken)));
        let text = String::from_utf8_lossy(&output.stdout);
        let found = text.lines().any(|line| line.starts_with(broken) && line.ends_with("FAILED"));
        assert!(!output.status.success() && found, "{plant} is not found:\n{text}");
    }
}

// Several tests, which run at the same time: each bug is a program of its own.

#[test]
fn bugs_planted_in_rows_and_sampling_are_found() {
    are_found(&[
        ("PLANT_RMSNORM_BARRIER", "rmsnorm"),
        ("PLANT_ROPE_SIGN", "finish_heads"),
        ("PLANT_BEST_TIES", "best_tokens"),
        ("PLANT_DRAW_ORDER", "draw_sums"),
    ]);
}

#[test]
fn bugs_planted_in_products_of_warps_are_found() {
    are_found(&[
        ("PLANT_GEMM_BARRIER", "gemm_store"),
        ("PLANT_GEMM_COLUMNS", "gemm_silu"),
        ("PLANT_CHUNKS_BARRIER", "gemm_store_chunks"),
    ]);
}

#[test]
fn bugs_planted_in_products_of_groups_are_found() {
    are_found(&[
        ("PLANT_WIDE_STAGE", "gemm_store_wide"),
        ("PLANT_WIDE_ENDS", "gemm_add_wide"),
        ("PLANT_FED_PHASE", "gemm_store_fed"),
        ("PLANT_FED_ENDS", "gemm_add_fed"),
    ]);
}

#[test]
fn bugs_planted_in_attention_are_found() {
    are_found(&[
        ("PLANT_ATTENTION_MASK", "attention"),
        ("PLANT_DECODE_UNSEEN", "attention_decode"),
        ("PLANT_PREFILL_WAIT", "attention_prefill"),
        ("PLANT_GROUPED_WAIT", "attention_grouped"),
        ("PLANT_GROUPED_OFFSETS", "attention_grouped"),
    ]);
}
