//! Tiles of products: which one computes a product of some shape. All that sum a weight alike give the same bits, so the choice among them is about speed alone.

use super::driver::{DriverError, Kernel, Module};
use std::ffi::CString;

/// Values of K in a stage of shared memory.
const DEPTH: usize = 64;

/// Rows up to which, and columns from which on, a weight is summed in chunks of its depth: with few rows there are too few outputs to keep the GPU busy, and
/// with a deep weight a chain is long.
const CHUNKED_ROWS_MAX: usize = 5120;
const CHUNKED_DEPTH_MIN: usize = 2048;
/// Chunks of a weight's depth (`CHUNKS` of `gemm.cuh`).
const CHUNKS: usize = 4;

/// Order in which the products of an output are added; a weight has one, whatever the number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sum {
    /// Chain of products over all columns, from the first to the last.
    Chain,
    /// Chain per chunk of so many columns; sums of chunks are added in ascending order.
    Chunks(usize),
}

impl Sum {
    /// Order for a weight of `rows` rows and `depth` columns, padding included.
    pub(super) fn of(rows: usize, depth: usize) -> Self {
        if rows > CHUNKED_ROWS_MAX || depth < CHUNKED_DEPTH_MIN {
            return Self::Chain;
        }
        Self::Chunks(depth.div_ceil(CHUNKS).next_multiple_of(DEPTH))
    }

    /// Columns of a chunk; of all columns, `depth`, for a chain.
    pub(super) fn chunk(self, depth: usize) -> usize {
        match self {
            Self::Chain => depth,
            Self::Chunks(chunk) => chunk,
        }
    }
}

/// A tile as `gemm.cu`, `wgmma.cu` and `wgmma_fed.cu` have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// End of the names of its kernels.
    name: &'static str,
    /// Rows of the weight, and tokens.
    shape: (usize, usize),
    threads: u32,
    /// Stages of shared memory, of all warps together.
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

const THIN: Tile = Tile::new("8", (16, 8), 32, 10);
const TALL: Tile = Tile::new("8_tall", (64, 8), 128, 8);
const SMALL: Tile = Tile::new("64", (32, 64), 128, 8);
const LARGE: Tile = Tile::new("128", (128, 128), 256, 3);
const WIDE_64: Tile = Tile::new("wide_64", (128, 64), 256, 6);
const WIDE_128: Tile = Tile::new("wide_128", (128, 128), 256, 6);
const FED_256: Tile = Tile::fed("fed_256", (128, 256), 4);
const WARP_TILES: [Tile; 4] = [THIN, TALL, SMALL, LARGE];
/// Of weights that are summed in chunks.
const CHUNKS_THIN: Tile = Tile::new("chunks_8", (16, 8), 128, 4 * 6);
const CHUNKS_SMALL: Tile = Tile::new("chunks_32", (16, 32), 128, 4 * 4);
const CHUNKS_LARGE: Tile = Tile::new("chunks_128", (128, 128), 256, 3);
const CHUNKS_WIDE_SMALL: Tile = Tile::new("chunks_wide_64", (64, 64), 512, 4 * 3);
const CHUNKS_WIDE_MIDDLE: Tile = Tile::new("chunks_wide_tall", (128, 64), 256, 6);
const CHUNKS_WIDE_LARGE: Tile = Tile::new("chunks_wide_large", (128, 128), 256, 6);
const CHUNKED_WARP_TILES: [Tile; 3] = [CHUNKS_THIN, CHUNKS_SMALL, CHUNKS_LARGE];
const CHUNKED_GROUP_TILES: [Tile; 3] = [CHUNKS_WIDE_SMALL, CHUNKS_WIDE_MIDDLE, CHUNKS_WIDE_LARGE];
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
    /// Finds the kernels. `groups`: the modules of `wgmma.cu` and `wgmma_fed.cu`, where the architecture has them.
    pub(super) fn new(
        warps: &Module,
        groups: Option<(&Module, &Module)>,
        multiprocessors: usize,
    ) -> Result<Self, DriverError> {
        let mut kernels = Vec::new();
        let mut find = |module: &Module, tile: Tile, ends: &[(End, &str)]| {
            for &(end, name) in ends {
                let name = CString::new(format!("gemm_{name}_{}", tile.name)).expect("names have no zeros");
                kernels.push((tile, end, module.kernel(&name, tile.threads, tile.shared_bytes())?));
            }
            Ok::<(), DriverError>(())
        };
        // Gated weights are not summed in chunks.
        let (all, chunked) = (&ENDS[..], &ENDS[..2]);
        WARP_TILES.into_iter().try_for_each(|tile| find(warps, tile, all))?;
        CHUNKED_WARP_TILES.into_iter().try_for_each(|tile| find(warps, tile, chunked))?;
        let Some((groups, fed)) = groups else { return Ok(Self { kernels, groups: &[], multiprocessors }) };
        let [wide @ .., (fed_tile, _)] = &GROUP_TILES;
        wide.iter().try_for_each(|(tile, _)| find(groups, *tile, all))?;
        CHUNKED_GROUP_TILES.into_iter().try_for_each(|tile| find(groups, tile, chunked))?;
        find(fed, *fed_tile, all)?;
        Ok(Self { kernels, groups: &GROUP_TILES, multiprocessors })
    }

    /// Leaves the tile of `wgmma_fed.cu`, as where it is not there.
    #[cfg(test)]
    pub(super) fn without_fed(&mut self) {
        self.groups = &self.groups[..self.groups.len().min(GROUP_TILES.len() - 1)];
    }

    /// Kernel and grid for a product of `rows` tokens with a weight of `columns` rows.
    ///
    /// # Panics
    /// If a gated weight is to be summed in chunks.
    pub(super) fn of(&self, end: End, sum: Sum, rows: usize, columns: usize) -> (Kernel, (usize, usize, usize)) {
        let tile = match sum {
            Sum::Chain => choose(rows, columns, self.groups, self.multiprocessors),
            Sum::Chunks(_) => choose_chunked(rows, columns, !self.groups.is_empty(), self.multiprocessors),
        };
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

/// As [`choose`], for a weight that is summed in chunks.
fn choose_chunked(rows: usize, columns: usize, has_groups: bool, multiprocessors: usize) -> Tile {
    if rows <= CHUNKS_THIN.shape.1 {
        return CHUNKS_THIN;
    }
    // Weights of few rows leave most multiprocessors idle with tiles of groups, also for more tokens.
    let small_max = if 4 * CHUNKS_WIDE_SMALL.grid(1, columns).1 < multiprocessors { 4 } else { 1 };
    if rows <= small_max * CHUNKS_SMALL.shape.1 {
        return CHUNKS_SMALL;
    }
    if !has_groups {
        return if rows <= 2 * CHUNKS_SMALL.shape.1 { CHUNKS_SMALL } else { CHUNKS_LARGE };
    }
    // As in `choose`, by the times of blocks.
    let tiles = [(CHUNKS_WIDE_SMALL, 64), (CHUNKS_WIDE_MIDDLE, 100), (CHUNKS_WIDE_LARGE, 105)];
    let time = |(tile, block): &(Tile, usize)| tile.count(rows, columns).div_ceil(multiprocessors) * block;
    tiles.iter().rev().min_by_key(|&tile| time(tile)).expect("there are some").0
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
    fn deep_weights_of_few_rows_are_summed_in_chunks() {
        let of = |rows, depth| Sum::of(rows, depth);
        assert_eq!(of(4096, 14336), Sum::Chunks(3584));
        assert_eq!(of(1024, 2112), Sum::Chunks(576));
        assert_eq!([of(28672, 4096), of(4096, 1024), of(128_256, 4096)], [Sum::Chain; 3]);
        let are_few = |depth: usize| depth.div_ceil(of(1, depth).chunk(depth)) <= CHUNKS;
        assert!((64..20_000).step_by(64).all(are_few), "no more chunks than warps");
    }

    #[test]
    fn chunked_weights_get_tiles_of_their_own() {
        let of = |rows, has_groups| choose_chunked(rows, 4096, has_groups, 132).name;
        assert_eq!([1, 8, 9, 32].map(|rows| of(rows, true)), ["chunks_8", "chunks_8", "chunks_32", "chunks_32"]);
        assert_eq!([64, 128].map(|rows| of(rows, true)), ["chunks_wide_64"; 2]);
        assert_eq!([256, 2048].map(|rows| of(rows, true)), ["chunks_wide_tall", "chunks_wide_large"]);
        assert_eq!([1, 9, 65, 2048].map(|rows| of(rows, false)), ["chunks_8", "chunks_32", "chunks_128", "chunks_128"]);
        let of = |rows| choose_chunked(rows, 1024, true, 132).name;
        assert_eq!([32, 128, 256].map(of), ["chunks_32", "chunks_32", "chunks_wide_64"]);
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
        let mut of_warps = WARP_TILES.iter().chain(&CHUNKED_WARP_TILES);
        assert!(of_warps.all(|tile| tile.shared_bytes() <= 99 << 10), "compute capability 8.6 and 12.0");
        let mut of_groups = GROUP_TILES.iter().map(|(tile, _)| tile).chain(&CHUNKED_GROUP_TILES);
        assert!(of_groups.all(|tile| tile.shared_bytes() <= 227 << 10), "9.0");
    }
}
