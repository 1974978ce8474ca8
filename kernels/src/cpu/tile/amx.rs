//! AMX: two tile rows of A by two tiles of B, all of k in one `asm!` block, since tile registers mean nothing between two blocks.
//!
//! The program is a list of tile operations, written once ([`short_program`], [`tall_program`]) and expanded twice: to instructions,
//! and in tests to calls of a software model of the tile registers (`amx_model.rs`). So layout, indices and tails are
//! tested on every machine. The model follows the pseudo-code of TDPBF16PS in Intel's manual, whose order an AMX machine was measured to keep.
//!
//! What comes next of B is fetched meanwhile ([`Ahead`](super::Ahead)): from memory it would take longer than the products with it.
//!
//! ```text
//! tmm0 tmm1   C, rows 0..16,  columns 0..16 and 16..32        tmm4  A, rows 0..16      tmm6  B, columns 0..16
//! tmm2 tmm3   C, rows 16..32, the same                        tmm5  A, rows 16..32     tmm7  B, columns 16..32
//! ```

/// Rows of a group: two tile rows.
#[cfg_attr(not(any(test, target_arch = "x86_64")), expect(dead_code, reason = "for x86-64 and tests"))]
pub(in crate::cpu) const ROWS_MAX: usize = 32;

/// Blocks of k at once, 512 values: a panel's part is 32 KiB and stays in a first-level cache of 48 KiB beside the
/// stream of A.
#[cfg_attr(not(any(test, target_arch = "x86_64")), expect(dead_code, reason = "for x86-64 and tests"))]
pub(in crate::cpu) const K_BLOCKS_AT_ONCE: usize = 16;

/// Program for up to sixteen rows. `begin` or `resume`, then `step` per 32 values of k, then `end`. Operands: pointer,
/// byte offset, stride (`line`: 64 bytes, `row`: 128 bytes). `stream` is a load that does not displace B from the
/// first-level cache.
macro_rules! short_program {
    ($with:ident, $argument:expr) => {
        $with! {
            $argument;
            begin { (zero 0) (zero 1) }
            resume { (load 0 c 0 row) (load 1 c 64 row) }
            step { (load 6 b 0 line) (stream 4 a 0 line) (dot 0 4 6) (load 7 b 1024 line) (dot 1 4 7) }
            end { (store 0 c 0 row) (store 1 c 64 row) }
        }
    };
}

/// Program for seventeen to 32 rows.
macro_rules! tall_program {
    ($with:ident, $argument:expr) => {
        $with! {
            $argument;
            begin { (zero 0) (zero 1) (zero 2) (zero 3) }
            resume { (load 0 c 0 row) (load 1 c 64 row) (load 2 c 2048 row) (load 3 c 2112 row) }
            step {
                (load 6 b 0 line) (stream 4 a 0 line) (dot 0 4 6)
                (load 7 b 1024 line) (dot 1 4 7)
                (stream 5 a 1024 line) (dot 2 5 6) (dot 3 5 7)
            }
            end { (store 0 c 0 row) (store 1 c 64 row) (store 2 c 2048 row) (store 3 c 2112 row) }
        }
    };
}

#[cfg(test)]
#[path = "amx_model.rs"]
mod model;
#[cfg(test)]
pub(in crate::cpu) use model::product as model_product;

#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) use machine::{configure, product};

#[cfg(target_arch = "x86_64")]
mod machine {
    use std::arch::asm;
    use std::cell::Cell;

    use super::super::{Ahead, Blocks, Product, block};
    use super::K_BLOCKS_AT_ONCE;

    /// Tile product of the AMX path; see [`super::super::TileFn`].
    ///
    /// # Safety
    /// As `TileFn`; the machine has AMX-TILE and AMX-BF16 and the process may use them.
    pub(in crate::cpu) unsafe fn product(p: &Product<'_>) {
        // SAFETY: the caller's promise about the machine.
        unsafe { configure(p.rows, 16) };
        match p.b {
            // SAFETY: the caller's promise.
            Blocks::List(list) => unsafe { run(p, list) },
            Blocks::Contiguous(_) => {
                let mut rest = *p;
                for first in (0..p.k_blocks).step_by(K_BLOCKS_AT_ONCE) {
                    let list: [_; K_BLOCKS_AT_ONCE] = std::array::from_fn(|i| block(p.b, first + i));
                    (rest.b, rest.k_blocks) = (Blocks::Contiguous(list[0]), K_BLOCKS_AT_ONCE.min(p.k_blocks - first));
                    rest.accumulate = p.accumulate || first > 0;
                    rest.a = p.a.wrapping_add(first * p.rows * 32);
                    if let Ahead::Next { from, lines } = p.ahead {
                        rest.ahead = Ahead::Next { from: from.wrapping_add(first * 1024), lines };
                    }
                    // SAFETY: the caller's promise; the list has at least `rest.k_blocks` entries.
                    unsafe { run(&rest, &list) };
                }
            }
        }
    }

    /// Values between what is multiplied and what is fetched of a stream: 4 KiB.
    const STREAM_AHEAD: usize = 2048;

    /// Configuration block of 64 bytes that LDTILECFG reads: palette 1, then bytes per row and rows of each tile.
    #[repr(C, align(64))]
    struct Config([u8; 64]);

    thread_local! {
        /// Rows and words for which this thread's tiles are configured; zeros before the first configuration.
        static CONFIGURED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    }

    /// Configures this thread's tiles for groups of `rows` rows of A, of which a tile holds `words` words of four bytes, if that differs
    /// from the current configuration. B's tiles have `words` rows.
    ///
    /// # Safety
    /// The machine has AMX-TILE and the process may use it; `rows` is 1 to 32, `words` 1 to 16.
    pub(in crate::cpu) unsafe fn configure(rows: usize, words: usize) {
        if CONFIGURED.replace((rows, words)) == (rows, words) {
            return;
        }
        let (low, high, words) = (rows.min(16) as u8, rows.saturating_sub(16).max(1) as u8, words as u8);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for (tile, rows) in [low, low, high, high, low, high, words, words].into_iter().enumerate() {
            config.0[16 + 2 * tile] = if tile == 4 || tile == 5 { words * 4 } else { 64 };
            config.0[48 + tile] = rows;
        }
        // SAFETY: the block reads 64 valid bytes; it declares that it may read memory, so the stores above are not dropped.
        unsafe { asm!("ldtilecfg [{config}]", config = in(reg) &raw const config, options(nostack)) };
    }

    macro_rules! text {
        (zero $t:literal) => {
            concat!("tilezero tmm", $t)
        };
        (load $t:literal $base:ident $offset:literal $stride:ident) => {
            concat!(
                "tileloadd tmm",
                $t,
                ", [{",
                stringify!($base),
                "} + {",
                stringify!($stride),
                "}*1 + ",
                $offset,
                "]"
            )
        };
        (stream $t:literal $base:ident $offset:literal $stride:ident) => {
            concat!(
                "tileloaddt1 tmm",
                $t,
                ", [{",
                stringify!($base),
                "} + {",
                stringify!($stride),
                "}*1 + ",
                $offset,
                "]"
            )
        };
        (store $t:literal $base:ident $offset:literal $stride:ident) => {
            concat!("tilestored [{", stringify!($base), "} + {", stringify!($stride), "}*1 + ", $offset, "], tmm", $t)
        };
        (dot $c:literal $a:literal $b:literal) => {
            concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b)
        };
    }

    macro_rules! execute {
        (
            $p:expr;
            begin { $(($($begin:tt)*))* }
            resume { $(($($resume:tt)*))* }
            step { $(($($step:tt)*))* }
            end { $(($($end:tt)*))* }
        ) => {{
            let (p, list): (&Product<'_>, &[*const u16]) = $p;
            let (ahead, ahead_bytes) = ahead(p);
            // SAFETY: A, B and C are valid for what the program touches (`TileFn`), `k_blocks` is at least 1 and not above the
            // length of the list, and `configure` has set this thread's tiles to `p.rows`.
            unsafe {
                asm!(
                    "test {resume}, {resume}",
                    "jnz 2f",
                    $(text!($($begin)*),)*
                    "jmp 3f",
                    "2:",
                    $(text!($($resume)*),)*
                    "3:",
                    "mov {b}, [{list}]",
                    $(text!($($step)*),)*
                    "mov {i}, {ahead_bytes}",
                    "4:",
                    "sub {i}, 64",
                    "prefetcht1 [{ahead} + {i}]",
                    "jnz 4b",
                    "add {ahead}, 2048",
                    "add {list}, 8",
                    "add {a}, {a_step}",
                    "dec {k}",
                    "jnz 3b",
                    $(text!($($end)*),)*
                    resume = in(reg) usize::from(p.accumulate),
                    a = inout(reg) p.a => _,
                    a_step = in(reg) p.rows * 64,
                    b = out(reg) _,
                    list = inout(reg) list.as_ptr() => _,
                    k = inout(reg) p.k_blocks => _,
                    c = in(reg) p.c,
                    ahead = inout(reg) ahead => _,
                    ahead_bytes = in(reg) ahead_bytes,
                    i = out(reg) _,
                    line = in(reg) 64usize,
                    row = in(reg) 128usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }};
    }

    /// Address from which to fetch into the second-level cache for the first block of k, and the bytes to fetch for each block.
    fn ahead(p: &Product<'_>) -> (*const u16, usize) {
        match (p.ahead, p.b) {
            (Ahead::Next { from, lines }, _) => (from, lines.max(1) * 64),
            (Ahead::Stream, Blocks::Contiguous(b)) => (b.wrapping_add(STREAM_AHEAD), 2048),
            // One line for each block, of A or of what lies behind it.
            _ => (p.a, 64),
        }
    }

    /// # Safety
    /// As [`product`]; `list` has at least `k_blocks` entries and this thread's tiles are configured for `rows`.
    unsafe fn run(p: &Product<'_>, list: &[*const u16]) {
        if p.k_blocks == 0 {
            return;
        }
        if p.rows <= 16 {
            short_program!(execute, (p, list));
        } else {
            tall_program!(execute, (p, list));
        }
    }
}
