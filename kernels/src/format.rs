//! Formats of weights: element types of a checkpoint, the order of its rows, and the form in which a device holds a matrix.

#[cfg(doc)]
use crate::device::{Device, DeviceInfo, Feature};

/// Element types of tensors in a checkpoint: numbers of 16 or 32 bits, and GGUF's blocks of small integers with scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// bfloat16: 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE 754 half precision: 5 bits of exponent, 10 of fraction.
    F16,
    /// IEEE 754 single precision, 32 bits.
    F32,
    /// 8 bits, one scale per 32.
    Q8_0,
    /// 4 bits, one scale per 32.
    Q4_0,
    /// 4 bits, scale and minimum per 32.
    Q4_1,
    /// 5 bits, one scale per 32.
    Q5_0,
    /// 5 bits, scale and minimum per 32.
    Q5_1,
    /// 2 bits, scale and minimum of 4 bits per 16, one scale of those per 256.
    Q2K,
    /// 3 bits, scale of 6 bits per 16, one scale of those per 256.
    Q3K,
    /// 4 bits, scale and minimum of 6 bits per 32, one scale of those per 256.
    Q4K,
    /// 5 bits, scale and minimum of 6 bits per 32, one scale of those per 256.
    Q5K,
    /// 6 bits, scale of 8 bits per 16, one scale of those per 256.
    Q6K,
    /// 4 bits as codes of 16 uneven levels, one scale per 32.
    Iq4Nl,
    /// 4 bits as codes of the levels of IQ4_NL, scale of 6 bits per 32, one scale of those per 256.
    Iq4Xs,
    /// 4 bits as E2M1 codes, one power of two per 32.
    Mxfp4,
}

impl DType {
    /// Every type, numbers first.
    pub const ALL: [DType; 16] = [
        DType::Bf16,
        DType::F16,
        DType::F32,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q2K,
        DType::Q3K,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Iq4Nl,
        DType::Iq4Xs,
        DType::Mxfp4,
    ];

    /// Name of the type, as in numerics strings.
    pub fn name(self) -> &'static str {
        match self {
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F32 => "f32",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
            DType::Q5_0 => "q5_0",
            DType::Q5_1 => "q5_1",
            DType::Q2K => "q2_k",
            DType::Q3K => "q3_k",
            DType::Q4K => "q4_k",
            DType::Q5K => "q5_k",
            DType::Q6K => "q6_k",
            DType::Iq4Nl => "iq4_nl",
            DType::Iq4Xs => "iq4_xs",
            DType::Mxfp4 => "mxfp4",
        }
    }

    /// Values and bytes of one block; a type of plain numbers has blocks of one.
    pub const fn block(self) -> (usize, usize) {
        match self {
            DType::Bf16 | DType::F16 => (1, 2),
            DType::F32 => (1, 4),
            DType::Q8_0 => (32, 34),
            DType::Q4_0 | DType::Iq4Nl => (32, 18),
            DType::Q4_1 => (32, 20),
            DType::Q5_0 => (32, 22),
            DType::Q5_1 => (32, 24),
            DType::Q2K => (256, 84),
            DType::Q3K => (256, 110),
            DType::Q4K => (256, 144),
            DType::Q5K => (256, 176),
            DType::Q6K => (256, 210),
            DType::Iq4Xs => (256, 136),
            DType::Mxfp4 => (32, 17),
        }
    }

    /// Bytes of a row of `columns` values; `None` if they are not whole blocks, or too many.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let (values, bytes) = self.block();
        if columns.is_multiple_of(values) { (columns / values).checked_mul(bytes) } else { None }
    }

    /// Returns true if a [`Device`] that holds its matrices as `held` rounds weights of this type. Blocks of integers are held as they are.
    pub fn is_rounded_to(self, held: DType) -> bool {
        let fraction = |dtype| match dtype {
            DType::Bf16 => 7,
            DType::F16 => 10,
            DType::F32 => 23,
            _ => 0,
        };
        fraction(self) > fraction(held)
    }

    /// Returns true if the type consists of blocks with a scale.
    pub fn is_blocks(self) -> bool {
        self.block().0 > 1
    }
}

/// Form in which a device holds a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Held {
    /// As it is stored: numbers in the device's own type ([`DeviceInfo::weights`]), blocks of integers as such.
    #[default]
    Stored,
    /// Integers of 8 bits with one scale per row of the matrix, rounded at load. Activations become 8 bits with one scale per
    /// row too, and an output is one integer sum.
    Int8,
    /// Blocks of 32 integers of 4 bits with one scale, as [`DType::Q4_0`], rounded at load. A matrix that would be held in 4 bits or fewer stays as it is.
    Int4,
    /// Blocks of 32 integers of 8 bits with one scale, as [`DType::Q8_0`], rounded at load. A matrix stored in integers or codes stays as it is.
    Int8Blocks,
}

impl Held {
    /// Form of the head of a model whose other matrices have this one. A head of 4 bits would lose more than the other matrices.
    pub fn of_head(self) -> Self {
        if self == Held::Int4 { Held::Int8Blocks } else { self }
    }

    /// Name of the format that matrices are rounded to at load, as operators write it; `None` if they are held as they are stored.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Held::Stored => None,
            Held::Int8 => Some("int8"),
            Held::Int4 | Held::Int8Blocks => Some("int4"),
        }
    }

    /// Returns true if a matrix that is stored in `bits` bits per weight, scales not counted, stays as it is.
    pub fn keeps(self, bits: u8) -> bool {
        match self {
            Held::Stored => true,
            Held::Int8 => false,
            Held::Int4 => bits <= 4,
            Held::Int8Blocks => bits <= 8,
        }
    }
}

/// Form in which the KV cache keeps keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvFormat {
    /// Numbers in the device's own type: bf16, or f32 on the reference.
    #[default]
    Own,
    /// Integers of 8 bits with one f32 scale per token, head and part ([`Feature::IntegerKv`]), rounded when they are written.
    Int8,
}

impl KvFormat {
    /// Name of the format as operators write it.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::Own => "bf16",
            KvFormat::Int8 => "int8",
        }
    }

    /// Format of this name; `None` for another name.
    pub fn named(name: &str) -> Option<Self> {
        [KvFormat::Own, KvFormat::Int8].into_iter().find(|format| format.name() == name)
    }

    /// Bytes of a key or value of `dim` numbers, on devices other than the reference.
    pub const fn row_bytes(self, dim: usize) -> usize {
        match self {
            KvFormat::Own => 2 * dim,
            KvFormat::Int8 => dim + size_of::<f32>(),
        }
    }
}

/// Order in which the rows of a matrix are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowOrder {
    /// As the operations need them.
    #[default]
    Plain,
    /// Within each head, the two halves of a rotation are stored side by side (`0, d/2, 1, d/2 + 1, …`), as GGUF has the query and key
    /// projections of `llama`, as DeepSeek has the rotated rows of its heads, and as GLM-4 has the first half of each; the device reads them back as halves.
    Pairs {
        /// Rows of one head.
        head_dim: usize,
        /// First rows of each head that are not rotated and lie as they should.
        plain: usize,
        /// Rows behind them whose halves lie side by side, an even number; the rows behind those lie as they should, too.
        rotated: usize,
    },
}

impl RowOrder {
    /// Index at which `row` is stored.
    pub fn stored(self, row: usize) -> usize {
        match self {
            RowOrder::Plain => row,
            RowOrder::Pairs { head_dim, plain, rotated } => {
                let half = rotated / 2;
                match (row % head_dim).checked_sub(plain).filter(|i| *i < rotated) {
                    None => row,
                    Some(i) => row - i + i % half * 2 + i / half,
                }
            }
        }
    }
}
