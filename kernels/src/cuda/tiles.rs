//! Tiles of products: which one computes a product of some shape. All give the same bits, so the choice is about speed alone.

use super::driver::{DriverError, Kernel, Module};
use std::ffi::CString;

/// Values of K in a stage of shared memory.
const DEPTH: usize = 64;

/// A tile as `gemm.cu` and `wgmma.cu` have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// End of the names of its kernels.
    name: &'static str,
    /// Rows of the weight, and tokens.
    shape: (usize, usize),
    threads: u32,
    stages: usize,
}

impl Tile {
    const fn new(name: &'static str, shape: (usize, usize), threads: u32, stages: usize) -> Self {
        Self { name, shape, threads, stages }
    }

    /// Bytes of shared memory of a block.
    fn shared_bytes(self) -> usize {
        self.stages * (self.shape.0 + self.shape.1) * DEPTH * size_of::<u16>()
    }

    /// Tiles of a product of `rows` tokens with a weight of `columns` rows: along tokens, along the weight.
    fn grid(self, rows: usize, columns: usize) -> (usize, usize) {
        (rows.div_ceil(self.shape.1), columns.div_ceil(self.shape.0))
    }

    fn count(self, rows: usize, columns: usize) -> usize {
        let (along_rows, along_columns) = self.grid(rows, columns);
        along_rows * along_columns
    }
}

const THIN: Tile = Tile::new("8", (16, 8), 32, 12);
const TALL: Tile = Tile::new("8_tall", (64, 8), 128, 8);
const SMALL: Tile = Tile::new("64", (32, 64), 128, 8);
const LARGE: Tile = Tile::new("128", (128, 128), 256, 3);
const WIDE_SMALL: Tile = Tile::new("wide_64", (128, 64), 256, 6);
const WIDE_LARGE: Tile = Tile::new("wide_128", (128, 128), 256, 6);
const WARP_TILES: [Tile; 4] = [THIN, TALL, SMALL, LARGE];
const GROUP_TILES: [Tile; 2] = [WIDE_SMALL, WIDE_LARGE];

/// Rows of a weight from which blocks of more than one warp pay for few tokens: the head of a large vocabulary.
const TALL_COLUMNS: usize = 1 << 16;

/// Use of a product's sums: stored, added to the output, or gated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Store,
    Add,
    Silu,
}

const ENDS: [(End, &str); 3] = [(End::Store, "store"), (End::Add, "add"), (End::Silu, "silu")];

/// Kernels of all products, by tile.
#[derive(Debug)]
pub(super) struct Products {
    kernels: Vec<(Tile, End, Kernel)>,
    has_groups: bool,
    multiprocessors: usize,
}

impl Products {
    /// Finds the kernels. `groups`: the module of `wgmma.cu`, where the architecture has one.
    pub(super) fn new(warps: &Module, groups: Option<&Module>, multiprocessors: usize) -> Result<Self, DriverError> {
        let mut kernels = Vec::new();
        let all = WARP_TILES.map(|tile| (warps, tile)).into_iter();
        for (module, tile) in all.chain(groups.into_iter().flat_map(|module| GROUP_TILES.map(|tile| (module, tile)))) {
            for (end, name) in ENDS {
                let name = CString::new(format!("gemm_{name}_{}", tile.name)).expect("names have no zeros");
                kernels.push((tile, end, module.kernel(&name, tile.threads, tile.shared_bytes())?));
            }
        }
        Ok(Self { kernels, has_groups: groups.is_some(), multiprocessors })
    }

    /// Kernel and grid for a product of `rows` tokens with a weight of `columns` rows.
    pub(super) fn of(&self, end: End, rows: usize, columns: usize) -> (Kernel, (usize, usize, usize)) {
        let tile = choose(rows, columns, self.has_groups, self.multiprocessors);
        let found = self.kernels.iter().find(|(known, ends, _)| (*known, *ends) == (tile, end));
        let ((x, y), (_, _, kernel)) = (tile.grid(rows, columns), found.expect("every tile that is chosen was loaded"));
        (*kernel, (x, y, 1))
    }
}

/// The tile that is fastest, by what an H100 of 132 multiprocessors showed.
fn choose(rows: usize, columns: usize, has_groups: bool, multiprocessors: usize) -> Tile {
    if rows <= THIN.shape.1 {
        return if columns >= TALL_COLUMNS { TALL } else { THIN };
    }
    if !has_groups {
        let is_large = rows > SMALL.shape.1 && 2 * LARGE.count(rows, columns) >= multiprocessors;
        return if is_large { LARGE } else { SMALL };
    }
    let blocks = WIDE_SMALL.count(rows, columns);
    if 3 * blocks < multiprocessors {
        return SMALL;
    }
    // One block per multiprocessor at a time; a large tile takes about 1.25 times as long as a small one.
    let rounds = |tile: Tile| tile.count(rows, columns).div_ceil(multiprocessors);
    if 5 * rounds(WIDE_LARGE) <= 4 * rounds(WIDE_SMALL) { WIDE_LARGE } else { WIDE_SMALL }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_of_models_get_the_tiles_that_were_fastest() {
        let of = |rows, columns| choose(rows, columns, true, 132).name;
        assert_eq!([1, 8, 9, 64].map(|rows| of(rows, 4096)), ["8", "8", "64", "64"]);
        assert_eq!([1, 32, 128, 256].map(|rows| of(rows, 28672)), ["8", "wide_64", "wide_128", "wide_128"]);
        assert_eq!([256, 2048].map(|rows| of(rows, 4096)), ["wide_64", "wide_128"]);
        assert_eq!(of(1, 128_256), "8_tall");
        let of = |rows, columns| choose(rows, columns, false, 84).name;
        assert_eq!([1, 32, 128, 2048].map(|rows| of(rows, 4096)), ["8", "64", "64", "128"]);
    }

    #[test]
    fn shared_memory_is_within_what_a_block_can_have() {
        assert!(WARP_TILES.iter().all(|tile| tile.shared_bytes() <= 99 << 10), "compute capability 8.6 and 12.0");
        assert!(GROUP_TILES.iter().all(|tile| tile.shared_bytes() <= 227 << 10), "9.0");
    }
}
