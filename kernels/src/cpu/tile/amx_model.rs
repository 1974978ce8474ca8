//! A software model of the tile registers, which runs the programs of `amx.rs` on machines without AMX.

use super::super::{Product, block};

/// One tile register as configured: `rows` lines of 64 bytes.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    words: [[u32; 16]; 16],
}

struct Tiles([Tile; 8]);

impl Tiles {
    /// Creates the registers, configured as `configure` in `amx.rs` does.
    fn new(rows: usize) -> Self {
        let (low, high) = (rows.min(16), rows.saturating_sub(16).max(1));
        Self([low, low, high, high, low, high, 16, 16].map(|rows| Tile { rows, words: [[0xdead_beef; 16]; 16] }))
    }

    fn zero(&mut self, tile: usize) {
        self.0[tile].words = [[0; 16]; 16];
    }

    /// # Safety
    /// The tile's rows at `stride` bytes are readable.
    unsafe fn load(&mut self, tile: usize, from: *const u8, stride: usize) {
        for row in 0..self.0[tile].rows {
            // SAFETY: the caller's promise.
            self.0[tile].words[row] = unsafe { from.add(row * stride).cast::<[u32; 16]>().read_unaligned() };
        }
    }

    /// # Safety
    /// The tile's rows at `stride` bytes are writable.
    unsafe fn store(&self, tile: usize, to: *mut u8, stride: usize) {
        for row in 0..self.0[tile].rows {
            // SAFETY: the caller's promise.
            unsafe { to.add(row * stride).cast::<[u32; 16]>().write_unaligned(self.0[tile].words[row]) };
        }
    }

    /// TDPBF16PS as Intel's manual writes it: two chains of FMAs over the pairs of k, their sum added to C; subnormals flushed.
    fn dot(&mut self, c: usize, a: usize, b: usize) {
        assert_eq!((self.0[c].rows, self.0[b].rows), (self.0[a].rows, 16), "tile shapes");
        for m in 0..self.0[c].rows {
            for n in 0..16 {
                let mut chains = [0.0f32; 2];
                for k in 0..16 {
                    let (x, y) = (halves(self.0[a].words[m][k]), halves(self.0[b].words[k][n]));
                    for i in 0..2 {
                        chains[i] = flush(x[i].mul_add(y[i], chains[i]));
                    }
                }
                let old = f32::from_bits(self.0[c].words[m][n]);
                self.0[c].words[m][n] = flush(flush(old) + flush(chains[0] + chains[1])).to_bits();
            }
        }
    }
}

fn halves(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)].map(flush)
}

fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

macro_rules! call {
    ($t:ident $a:ident $b:ident $c:ident; zero $tile:literal) => {
        $t.zero($tile)
    };
    ($t:ident $a:ident $b:ident $c:ident; load $tile:literal c $offset:literal row) => {
        $t.load($tile, $c.add($offset), 128)
    };
    ($t:ident $a:ident $b:ident $c:ident; store $tile:literal c $offset:literal row) => {
        $t.store($tile, $c.add($offset), 128)
    };
    ($t:ident $a:ident $b:ident $c:ident; load $tile:literal b $offset:literal line) => {
        $t.load($tile, $b.add($offset), 64)
    };
    ($t:ident $a:ident $b:ident $c:ident; stream $tile:literal a $offset:literal line) => {
        $t.load($tile, $a.add($offset), 64)
    };
    ($t:ident $a:ident $b:ident $c:ident; dot $d:literal $x:literal $y:literal) => {
        $t.dot($d, $x, $y)
    };
}

macro_rules! interpret {
    (
        $p:expr;
        begin { $(($($begin:tt)*))* }
        resume { $(($($resume:tt)*))* }
        step { $(($($step:tt)*))* }
        end { $(($($end:tt)*))* }
    ) => {{
        let p: &Product<'_> = $p;
        let (mut tiles, mut a, c) = (Tiles::new(p.rows), p.a.cast::<u8>(), p.c.cast::<u8>());
        // SAFETY: A, B and C are valid for what the program touches (`TileFn`).
        #[allow(unused_unsafe, reason = "the zero and dot operations are safe in the model")]
        unsafe {
            if p.accumulate {
                $(call!(tiles a b c; $($resume)*);)*
            } else {
                $(call!(tiles a b c; $($begin)*);)*
            }
            for k in 0..p.k_blocks {
                let b = block(p.b, k).cast::<u8>();
                $(call!(tiles a b c; $($step)*);)*
                a = a.add(p.rows * 64);
            }
            $(call!(tiles a b c; $($end)*);)*
        }
    }};
}

/// Tile product of the model; see [`super::super::TileFn`].
///
/// # Safety
/// As `TileFn`, on any machine.
pub(in crate::cpu) unsafe fn product(p: &Product<'_>) {
    if p.rows <= 16 {
        short_program!(interpret, p);
    } else {
        tall_program!(interpret, p);
    }
}
