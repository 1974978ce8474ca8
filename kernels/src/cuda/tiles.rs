//! Tiles of products: which one computes a product of some shape. All give the same bits, so the choice is about speed alone.

use super::driver::{DriverError, Kernel, Module};
use std::ffi::CString;

/// Values of K in a stage of shared memory.
const DEPTH: usize = 64;

/// A tile as `gemm.cu`, `wgmma.cu` and `wgmma_fed.cu` have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// End of the names of its kernels.
    name: &'static str,
    /// Rows of the weight, and tokens.
    shape: (usize, usize),
    threads: u32,
    stages: usize,
    /// Bytes of shared memory beside the stages.
    beside: usize,
}

impl Tile {
    const fn new(name: &'static str, shape: (usize, usize), threads: u32, stages: usize) -> Self {
        Self { name, shape, threads, stages, beside: 0 }
    }

    /// A tile with a group of warps that copies, and the barriers by which it and the others wait for each other.
    const fn fed(name: &'static str, shape: (usize, usize), stages: usize) -> Self {
        Self { name, shape, threads: 384, stages, beside: 1024 }
    }

    /// Bytes of shared memory of a block.
    fn shared_bytes(self) -> usize {
        self.stages * (self.shape.0 + self.shape.1) * DEPTH * size_of::<u16>() + self.beside
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
const WIDE_64: Tile = Tile::new("wide_64", (128, 64), 256, 6);
const WIDE_128: Tile = Tile::new("wide_128", (128, 128), 256, 6);
const FED_256: Tile = Tile::fed("fed_256", (128, 256), 4);
const WARP_TILES: [Tile; 4] = [THIN, TALL, SMALL, LARGE];
/// Tiles of `wgmma.cu` and that of `wgmma_fed.cu`, by size, with the times of their blocks beside each other when every multiprocessor has one.
const GROUP_TILES: [(Tile, usize); 3] = [(WIDE_64, 100), (WIDE_128, 125), (FED_256, 185)];

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
    /// Tiles of groups of warps that are used, each with the time of a block; none on most architectures.
    groups: &'static [(Tile, usize)],
    multiprocessors: usize,
}

impl Products {
    /// Finds the kernels. `groups`, `fed`: the modules of `wgmma.cu` and `wgmma_fed.cu`, where the architecture has them; one with the second has the first.
    pub(super) fn new(
        warps: &Module,
        groups: Option<&Module>,
        fed: Option<&Module>,
        multiprocessors: usize,
    ) -> Result<Self, DriverError> {
        let mut kernels = Vec::new();
        let mut find = |module: &Module, tile: Tile| {
            for (end, name) in ENDS {
                let name = CString::new(format!("gemm_{name}_{}", tile.name)).expect("names have no zeros");
                kernels.push((tile, end, module.kernel(&name, tile.threads, tile.shared_bytes())?));
            }
            Ok(())
        };
        WARP_TILES.into_iter().try_for_each(|tile| find(warps, tile))?;
        let [wide @ .., (fed_tile, _)] = &GROUP_TILES;
        let mut used: &[_] = &[];
        if let Some(module) = groups {
            wide.iter().try_for_each(|(tile, _)| find(module, *tile))?;
            used = wide;
        }
        if let Some(module) = fed {
            find(module, *fed_tile)?;
            used = &GROUP_TILES;
        }
        Ok(Self { kernels, groups: used, multiprocessors })
    }

    /// Leaves the tile of `wgmma_fed.cu`, as where it is not there.
    #[cfg(test)]
    pub(super) fn without_fed(&mut self) {
        self.groups = &self.groups[..self.groups.len().min(GROUP_TILES.len() - 1)];
    }

    /// Kernel and grid for a product of `rows` tokens with a weight of `columns` rows.
    pub(super) fn of(&self, end: End, rows: usize, columns: usize) -> (Kernel, (usize, usize, usize)) {
        let tile = choose(rows, columns, self.groups, self.multiprocessors);
        let found = self.kernels.iter().find(|(known, ends, _)| (*known, *ends) == (tile, end));
        let ((x, y), (_, _, kernel)) = (tile.grid(rows, columns), found.expect("every tile that is chosen was loaded"));
        (*kernel, (x, y, 1))
    }
}

/// The tile that is fastest, by what an H100 of 132 multiprocessors showed. `groups`: tiles of groups of warps, each with the time of a block, by size.
fn choose(rows: usize, columns: usize, groups: &[(Tile, usize)], multiprocessors: usize) -> Tile {
    if rows <= THIN.shape.1 {
        return if columns >= TALL_COLUMNS { TALL } else { THIN };
    }
    let Some((smallest, _)) = groups.first() else {
        let is_large = rows > SMALL.shape.1 && 2 * LARGE.count(rows, columns) >= multiprocessors;
        return if is_large { LARGE } else { SMALL };
    };
    if 3 * smallest.count(rows, columns) < multiprocessors {
        return SMALL;
    }
    // One block per multiprocessor at a time. Of tiles that take as long, a larger one moves fewer bytes.
    let time = |(tile, block): &(Tile, usize)| tile.count(rows, columns).div_ceil(multiprocessors) * block;
    groups.iter().rev().min_by_key(|&group| time(group)).expect("there is a smallest").0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_of_models_get_the_tiles_that_were_fastest() {
        let of = |rows, columns| choose(rows, columns, &GROUP_TILES[..2], 132).name;
        assert_eq!([1, 8, 9, 64].map(|rows| of(rows, 4096)), ["8", "8", "64", "64"]);
        assert_eq!([1, 32, 128, 256].map(|rows| of(rows, 28672)), ["8", "wide_64", "wide_128", "wide_128"]);
        assert_eq!([256, 2048].map(|rows| of(rows, 4096)), ["wide_64", "wide_128"]);
        assert_eq!(of(1, 128_256), "8_tall");
        let of = |rows, columns| choose(rows, columns, &[], 84).name;
        assert_eq!([1, 32, 128, 2048].map(|rows| of(rows, 4096)), ["8", "64", "64", "128"]);
    }

    #[test]
    fn many_tokens_get_the_largest_tile_where_it_is() {
        let of = |rows, columns| choose(rows, columns, &GROUP_TILES, 132).name;
        assert_eq!([1, 64, 256].map(|rows| of(rows, 4096)), ["8", "64", "wide_64"]);
        assert_eq!([512, 2048, 4096].map(|rows| of(rows, 4096)), ["wide_128", "fed_256", "fed_256"]);
        assert_eq!([256, 512, 4096].map(|rows| of(rows, 6144)), ["wide_128", "fed_256", "fed_256"]);
        assert_eq!([32, 64, 128, 256].map(|rows| of(rows, 28672)), ["wide_64", "wide_64", "wide_128", "fed_256"]);
    }

    #[test]
    fn shared_memory_is_within_what_a_block_can_have() {
        assert!(WARP_TILES.iter().all(|tile| tile.shared_bytes() <= 99 << 10), "compute capability 8.6 and 12.0");
        assert!(GROUP_TILES.iter().all(|(tile, _)| tile.shared_bytes() <= 227 << 10), "9.0");
    }
}
