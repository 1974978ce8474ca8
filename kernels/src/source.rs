//! Reading weights from host tensors: shapes are checked here, once, for every device.

use std::ops::Range;

use crate::blocks::{Layout, RowBlocks, from_f16};
use crate::device::{
    ADAPTER_RANK_MAX, ADAPTERS_MAX, AdapterSlot, CodeForm, CodeRows, DType, ExpertSpec, HostTensor, KernelError,
    LowRank, RowOrder, RowReader, TableIndex, WeightSpec,
};

/// A tensor whose byte count matches its shape; its values can be read only through this type.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) dtype: DType,
    order: RowOrder,
    row_bytes: usize,
    bytes: &'a [u8],
    reader: Option<&'a dyn RowReader>,
}

impl<'a> Source<'a> {
    /// Checks that `tensor` has `dims` dimensions (a vector counts as one row) and as many bytes as its shape says.
    pub(crate) fn new(tensor: &HostTensor<'a>, dims: usize) -> Result<Self, KernelError> {
        let shape = tensor.shape;
        if shape.len() != dims || shape.contains(&0) {
            return Err(shape_error(tensor, format!("{dims} dimensions, none of them 0")));
        }
        let (rows, columns) = if dims == 2 { (shape[0], shape[1]) } else { (1, shape[0]) };
        let Some(row_bytes) = tensor.dtype.row_bytes(columns) else {
            let (values, name) = (tensor.dtype.block().0, tensor.dtype.name());
            return Err(shape_error(tensor, format!("rows of whole blocks of {values}, as {name} has them")));
        };
        let row_bytes = if tensor.reader.is_some() { 0 } else { row_bytes };
        if tensor.reader.is_some() && (dims != 2 || tensor.dtype != DType::F32) {
            return Err(shape_error(tensor, "a matrix of f32, as rows that are made by a reader are".into()));
        }
        if rows.checked_mul(row_bytes) != Some(tensor.bytes.len()) {
            return Err(shape_error(tensor, format!("as many elements as its {} bytes hold", tensor.bytes.len())));
        }
        if let RowOrder::Pairs { head_dim, plain, rotated } = tensor.order {
            let ordered = if dims == 2 { rows } else { columns };
            let fits = plain.checked_add(rotated).is_some_and(|end| end <= head_dim);
            if !fits || rotated < 2 || !rotated.is_multiple_of(2) || ordered % head_dim != 0 {
                let want =
                    format!("whole heads of {head_dim}, of which {rotated}, an even number, behind the first {plain}");
                return Err(shape_error(tensor, want));
            }
        }
        let HostTensor { dtype, order, bytes, reader, .. } = *tensor;
        Ok(Self { rows, columns, dtype, order, row_bytes, bytes, reader })
    }

    /// Integers and scale of row `row`, for a matrix that is held as it is stored, as [`RowReader::integers`].
    pub(crate) fn integers(&self, row: usize) -> Option<(&'a [u8], f32)> {
        self.reader?.integers(self.order.stored(row))
    }

    /// Form of the rows as codes, for a matrix that is held as it is stored, as [`RowReader::codes`].
    pub(crate) fn codes(&self) -> Option<CodeForm<'a>> {
        self.reader?.codes()
    }

    /// Bits per weight as it is stored, scales not counted; 16 for numbers.
    pub(crate) fn bits(&self) -> u8 {
        let of_codes = || self.codes().map(|codes| codes.kind.bits());
        let of_integers = || self.integers(0).map(|_| 8);
        Layout::of(self.dtype).map(|layout| layout.bits).or_else(of_codes).or_else(of_integers).unwrap_or(16)
    }

    /// Number of rows from `row` that are best read together: those in `following` that follow it in the same tensor, where a reader makes
    /// the values; else one.
    fn run(&self, row: usize, following: impl Iterator<Item = Option<(Source<'a>, usize)>>) -> usize {
        let Some(reader) = self.reader.filter(|_| self.order == RowOrder::Plain) else { return 1 };
        let follows = |(i, next): &(usize, Option<(Source<'a>, usize)>)| {
            next.is_some_and(|(source, at)| {
                at == row + i && source.reader.is_some_and(|other| std::ptr::addr_eq(reader, other))
            })
        };
        1 + (1..).zip(following).take_while(follows).count()
    }

    /// Stored bytes of row `row`.
    pub(crate) fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[self.order.stored(row) * self.row_bytes..][..self.row_bytes]
    }

    /// Copies row `row` as f32, exact for every [`DType`] of numbers. `out`: `[columns]`.
    pub(crate) fn read(&self, row: usize, out: &mut [f32]) {
        if let Some(reader) = self.reader {
            return reader.read(self.order.stored(row), out);
        }
        let bytes = self.row(row);
        match self.dtype {
            DType::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            DType::Bf16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                }
            }
            DType::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = from_f16(u16::from_le_bytes(*b));
                }
            }
            dtype => {
                let mut blocks = RowBlocks::default();
                blocks.decode(dtype, self.columns, bytes);
                blocks.to_f32(Layout::of(dtype).expect("a format of integers"), out);
            }
        }
    }

    /// Calls `each` with the index and the values of every row that `find` names for `0..count`. `rows`: memory that is reused.
    pub(crate) fn each_row(
        count: usize,
        rows: &mut Vec<f32>,
        find: impl Fn(usize) -> Option<(Source<'a>, usize)>,
        mut each: impl FnMut(usize, &[f32]),
    ) {
        Source::each_run(count, find, |n, source, row, run| {
            rows.resize(run * source.columns, 0.0);
            match source.reader {
                Some(reader) if run > 1 => reader.read(row, rows),
                _ => source.read(row, rows),
            }
            rows.chunks_exact(source.columns).zip(n..).for_each(|(row, n)| each(n, row));
        });
    }

    /// Calls `each` for the rows that `find` names for `0..count`, in runs of rows that one read gives: the index of the first, its source and
    /// row, and the length of the run.
    fn each_run(
        count: usize,
        find: impl Fn(usize) -> Option<(Source<'a>, usize)>,
        mut each: impl FnMut(usize, Source<'a>, usize, usize),
    ) {
        let mut n = 0;
        while n < count {
            let Some((source, row)) = find(n) else {
                n += 1;
                continue;
            };
            let run = source.run(row, (n + 1..count).map(&find));
            each(n, source, row, run);
            n += run;
        }
    }

    /// Calls `each` with the index and the codes of every row that `find` names for `0..count`, all of matrices of codes. `memory`: reused.
    pub(crate) fn each_codes(
        count: usize,
        memory: &mut CodeMemory,
        find: impl Fn(usize) -> Option<(Source<'a>, usize)>,
        mut each: impl FnMut(usize, &CodeRows<'_>),
    ) {
        Source::each_run(count, find, |n, source, row, run| {
            let reader = source.reader.expect("a matrix of codes");
            let (columns, form) = (source.columns, reader.codes().expect("a matrix of codes"));
            let groups = form.groups.count(columns);
            memory.codes.resize(run * columns, 0);
            memory.scales.resize(run * groups, 0.0);
            memory.zeros.resize(run * groups, 0);
            let CodeMemory { codes, scales, zeros } = &mut *memory;
            reader.read_codes(source.order.stored(row), &mut CodeRows { columns, codes, scales, zeros });
            let parts = scales.chunks_exact_mut(groups).zip(zeros.chunks_exact_mut(groups));
            for ((codes, (scales, zeros)), n) in codes.chunks_exact_mut(columns).zip(parts).zip(n..) {
                each(n, &CodeRows { columns, codes, scales, zeros });
            }
        });
    }

    /// All values of the tensor converted to f32, row-major.
    pub(crate) fn to_f32(self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.columns];
        for (row, out) in out.chunks_exact_mut(self.columns).enumerate() {
            self.read(row, out);
        }
        out
    }

    /// Values of a vector, in the order in which the operations need them.
    pub(crate) fn to_vector(self) -> Vec<f32> {
        let stored = Self { order: RowOrder::Plain, ..self }.to_f32();
        (0..stored.len()).map(|i| stored[self.order.stored(i)]).collect()
    }
}

/// Memory of the rows that [`Source::each_codes`] reads.
#[derive(Default)]
pub(crate) struct CodeMemory {
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<u8>,
}

/// A [`WeightSpec`] whose shapes fit each other.
pub(crate) enum Checked<'a> {
    /// Values with their offset.
    Vector(Vec<f32>),
    /// Parts with equal columns; the bias has as many values as the parts have rows together.
    Linear {
        parts: Vec<Source<'a>>,
        bias: Option<Vec<f32>>,
    },
    /// Two matrices of equal shape; each bias has as many values as its matrix has rows.
    GateUp {
        gate: Source<'a>,
        up: Source<'a>,
        biases: Option<[Vec<f32>; 2]>,
    },
    Embedding(Source<'a>),
    /// Table with its index, which has at least one row of its own.
    Table(Source<'a>, TableIndex),
    Heads(Vec<HeadMatrix>),
}

/// Matrix of one head, `[rows, columns]` f32, row-major: outputs by inputs.
pub(crate) struct HeadMatrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) values: Vec<f32>,
}

impl<'a> Checked<'a> {
    pub(crate) fn new(spec: &WeightSpec<'a>) -> Result<Self, KernelError> {
        match spec {
            WeightSpec::Vector { tensor, offset } => {
                let values = Source::new(tensor, 1)?.to_vector();
                Ok(Self::Vector(values.into_iter().map(|value| value + offset).collect()))
            }
            WeightSpec::Embedding(tensor) => Ok(Self::Embedding(Source::new(tensor, 2)?)),
            WeightSpec::Table { tensor, index } => {
                let source = Source::new(tensor, 2)?;
                match *index {
                    TableIndex::Position { first } if source.rows <= first => {
                        Err(shape_error(tensor, format!("more rows than the {first} before position 0")))
                    }
                    index => Ok(Self::Table(source, index)),
                }
            }
            WeightSpec::GateUp { gate, up, biases } => {
                let (g, u) = (Source::new(gate, 2)?, Source::new(up, 2)?);
                if (g.rows, g.columns) != (u.rows, u.columns) {
                    return Err(shape_error(up, format!("the gate's shape {:?}", gate.shape)));
                }
                let biases = match biases {
                    Some([of_gate, of_up]) => Some([bias_of(of_gate, &g)?, bias_of(of_up, &u)?]),
                    None => None,
                };
                Ok(Self::GateUp { gate: g, up: u, biases })
            }
            WeightSpec::Linear { parts, biases } => linear(parts, biases),
            WeightSpec::Heads { tensor, heads, rows, transposed } => {
                Ok(Self::Heads(head_matrices(tensor, *heads, rows.clone(), *transposed)?))
            }
        }
    }
}

fn head_matrices(
    tensor: &HostTensor<'_>,
    heads: usize,
    rows: Range<usize>,
    transposed: bool,
) -> Result<Vec<HeadMatrix>, KernelError> {
    let source = Source::new(tensor, 2)?;
    let of_head = source.rows.checked_div(heads).unwrap_or(0);
    if of_head == 0 || source.rows != heads * of_head || rows.is_empty() || rows.end > of_head {
        return Err(shape_error(tensor, format!("rows {rows:?} of each of {heads} heads")));
    }
    let matrix = |head: usize| {
        let (count, columns) = (rows.len(), source.columns);
        let mut values = vec![0.0; count * columns];
        for (row, values) in rows.clone().zip(values.chunks_exact_mut(columns)) {
            source.read(head * of_head + row, values);
        }
        if !transposed {
            return HeadMatrix { rows: count, columns, values };
        }
        let turned = (0..columns).flat_map(|column| (0..count).map(move |row| row * columns + column));
        HeadMatrix { rows: columns, columns: count, values: turned.map(|at| values[at]).collect() }
    };
    Ok((0..heads).map(matrix).collect())
}

/// An [`ExpertSpec`] whose shapes fit each other.
pub(crate) struct CheckedExpert<'a> {
    pub(crate) gate: Source<'a>,
    pub(crate) up: Source<'a>,
    pub(crate) down: Source<'a>,
    /// Biases of gate, up and down.
    pub(crate) biases: Option<[Vec<f32>; 3]>,
}

/// Checks the experts of one layer: at least one, each of the first one's shape.
pub(crate) fn checked_experts<'a>(experts: &[ExpertSpec<'a>]) -> Result<Vec<CheckedExpert<'a>>, KernelError> {
    let Some(first) = experts.first() else {
        return Err(KernelError::Shape { name: "experts".into(), got: vec![0], want: "at least one expert".into() });
    };
    let gate = first.gate.shape;
    let down: Vec<usize> = gate.iter().rev().copied().collect();
    let alike = |tensor: &HostTensor<'a>, shape: &[usize]| match Source::new(tensor, 2) {
        Ok(source) if tensor.shape == shape => Ok(source),
        Ok(_) => Err(shape_error(tensor, format!("{shape:?}, as the first expert's gate has it"))),
        Err(error) => Err(error),
    };
    let check = |expert: &ExpertSpec<'a>| {
        let (gate, up, down) = (alike(&expert.gate, gate)?, alike(&expert.up, gate)?, alike(&expert.down, &down)?);
        if expert.biases.is_some() != first.biases.is_some() {
            return Err(shape_error(&expert.gate, "biases in all experts of a layer, or in none".into()));
        }
        let biases = match &expert.biases {
            Some([of_gate, of_up, of_down]) => {
                Some([bias_of(of_gate, &gate)?, bias_of(of_up, &up)?, bias_of(of_down, &down)?])
            }
            None => None,
        };
        Ok(CheckedExpert { gate, up, down, biases })
    };
    experts.iter().map(check).collect()
}

/// A [`LowRank`] that fits its weight.
pub(crate) struct CheckedLowRank {
    /// Outputs that are added to.
    pub(crate) outputs: Range<usize>,
    pub(crate) rank: usize,
    /// Matrix from the inputs, `[rank, in]`.
    pub(crate) a: Vec<f32>,
    /// Matrix to the outputs, `[outputs, rank]`.
    pub(crate) b: Vec<f32>,
    pub(crate) scale: f32,
}

/// Checks additions to a weight of `outputs` stacked outputs and `inputs` inputs: at least one, each inside.
pub(crate) fn checked_low_ranks(
    parts: &[LowRank<'_>],
    AdapterSlot(slot): AdapterSlot,
    outputs: usize,
    inputs: usize,
) -> Result<Vec<CheckedLowRank>, KernelError> {
    if usize::from(slot) >= ADAPTERS_MAX || parts.is_empty() {
        let want = format!("a slot below {ADAPTERS_MAX} and at least one addition");
        return Err(KernelError::Shape { name: "adapter".into(), got: vec![usize::from(slot), parts.len()], want });
    }
    let check = |part: &LowRank<'_>| {
        let (a, b) = (Source::new(&part.a, 2)?, Source::new(&part.b, 2)?);
        for (tensor, source) in [(&part.a, &a), (&part.b, &b)] {
            if source.dtype.is_blocks() || source.order != RowOrder::Plain {
                return Err(shape_error(tensor, "plain numbers in their own order".into()));
            }
        }
        if a.columns != inputs || a.rows > ADAPTER_RANK_MAX {
            return Err(shape_error(&part.a, format!("a rank of at most {ADAPTER_RANK_MAX}, and {inputs} columns")));
        }
        let room = outputs.saturating_sub(part.first);
        if b.columns != a.rows || b.rows > room {
            return Err(shape_error(&part.b, format!("at most {room} rows, and {} columns", a.rows)));
        }
        let outputs = part.first..part.first + b.rows;
        Ok(CheckedLowRank { outputs, rank: a.rows, a: a.to_f32(), b: b.to_f32(), scale: part.scale })
    };
    parts.iter().map(check).collect()
}

fn linear<'a>(parts: &[HostTensor<'a>], biases: &[HostTensor<'a>]) -> Result<Checked<'a>, KernelError> {
    let sources = parts.iter().map(|part| Source::new(part, 2)).collect::<Result<Vec<_>, _>>()?;
    let Some(columns) = sources.first().map(|first| first.columns) else {
        return Err(KernelError::Shape { name: "linear".into(), got: vec![0], want: "at least one part".into() });
    };
    for (part, source) in parts.iter().zip(&sources) {
        if source.columns != columns {
            return Err(shape_error(part, format!("{columns} columns, as the first part has")));
        }
    }
    if biases.is_empty() {
        return Ok(Checked::Linear { parts: sources, bias: None });
    }
    if biases.len() != parts.len() {
        return Err(shape_error(&biases[0], format!("{} biases, one per part", parts.len())));
    }
    let mut all = Vec::new();
    for (bias, source) in biases.iter().zip(&sources) {
        all.extend(bias_of(bias, source)?);
    }
    Ok(Checked::Linear { parts: sources, bias: Some(all) })
}

/// Values of a bias, one per row of `matrix`.
fn bias_of(bias: &HostTensor<'_>, matrix: &Source<'_>) -> Result<Vec<f32>, KernelError> {
    let values = Source::new(bias, 1)?;
    if values.columns != matrix.rows {
        return Err(shape_error(bias, format!("[{}], the rows of its matrix", matrix.rows)));
    }
    Ok(values.to_vector())
}

fn shape_error(tensor: &HostTensor<'_>, want: String) -> KernelError {
    KernelError::Shape { name: tensor.name.to_owned(), got: tensor.shape.to_vec(), want }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_convert_exactly() {
        let half: Vec<u8> = [0x3c00u16, 0xc000, 0x0001].iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensor = HostTensor {
            name: "h",
            dtype: DType::F16,
            shape: &[3],
            bytes: &half,
            order: RowOrder::Plain,
            reader: None,
        };
        assert_eq!(Source::new(&tensor, 1).unwrap().to_f32(), [1.0, -2.0, 2f32.powi(-24)]);
        let brain: Vec<u8> = [0x3f80u16, 0xc040].iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensor = HostTensor {
            name: "b",
            dtype: DType::Bf16,
            shape: &[2, 1],
            bytes: &brain,
            order: RowOrder::Plain,
            reader: None,
        };
        let source = Source::new(&tensor, 2).unwrap();
        assert_eq!((source.rows, source.columns, source.to_f32()), (2, 1, vec![1.0, -3.0]));
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let bytes = [0u8; 24];
        let tensor = |name, shape| HostTensor {
            name,
            dtype: DType::F32,
            shape,
            bytes: &bytes,
            order: RowOrder::Plain,
            reader: None,
        };
        let refused = |spec: &WeightSpec<'_>| matches!(Checked::new(spec), Err(KernelError::Shape { .. }));
        assert!(refused(&WeightSpec::Vector { tensor: tensor("short", &[7]), offset: 0.0 }));
        assert!(refused(&WeightSpec::Vector { tensor: tensor("matrix", &[2, 3]), offset: 0.0 }));
        assert!(refused(&WeightSpec::Embedding(tensor("huge", &[usize::MAX, 3]))));
        assert!(refused(&WeightSpec::Linear { parts: vec![], biases: vec![] }));
        let (a, b) = (tensor("a", &[2, 3]), tensor("b", &[3, 2]));
        assert!(refused(&WeightSpec::Linear { parts: vec![a.clone(), b.clone()], biases: vec![] }));
        assert!(refused(&WeightSpec::GateUp { gate: a.clone(), up: b, biases: None }));
        let biases = Some([tensor("short", &[6]), tensor("short", &[6])]);
        assert!(refused(&WeightSpec::GateUp { gate: a.clone(), up: a.clone(), biases }));
        assert!(refused(&WeightSpec::Linear { parts: vec![a.clone()], biases: vec![tensor("bias", &[6])] }));
        assert!(Checked::new(&WeightSpec::Linear { parts: vec![a], biases: vec![] }).is_ok());
    }

    #[test]
    fn low_ranks_that_do_not_fit_are_refused() {
        let bytes = vec![0u8; 4 * 300 * 3];
        let matrix = |name, shape: &'static [usize]| HostTensor {
            name,
            dtype: DType::F32,
            shape,
            bytes: &bytes[..4 * shape[0] * shape[1]],
            order: RowOrder::Plain,
            reader: None,
        };
        // A weight of 6 outputs and 3 inputs.
        let check = |slot, first, a, b| {
            let part = LowRank { first, a: matrix("a", a), b: matrix("b", b), scale: 1.0 };
            checked_low_ranks(&[part], AdapterSlot(slot), 6, 3)
        };
        let good = check(63, 2, &[2, 3], &[4, 2]).unwrap();
        assert_eq!((good[0].outputs.clone(), good[0].rank), (2..6, 2));
        assert!(check(64, 2, &[2, 3], &[4, 2]).is_err());
        assert!(check(0, 3, &[2, 3], &[4, 2]).is_err());
        assert!(check(0, 7, &[2, 3], &[4, 2]).is_err());
        assert!(check(0, 0, &[3, 2], &[4, 3]).is_err());
        assert!(check(0, 0, &[2, 3], &[2, 4]).is_err());
        assert!(check(0, 0, &[300, 3], &[1, 300]).is_err());
        assert!(checked_low_ranks(&[], AdapterSlot(0), 6, 3).is_err());
        let blocks = HostTensor { dtype: DType::Q8_0, shape: &[1, 32], bytes: &bytes[..34], ..matrix("a", &[1, 3]) };
        let part = LowRank { first: 0, a: blocks, b: matrix("b", &[4, 1]), scale: 1.0 };
        assert!(checked_low_ranks(&[part], AdapterSlot(0), 6, 32).is_err());
    }

    #[test]
    fn experts_of_other_shapes_are_refused() {
        let bytes = [0u8; 24];
        let tensor = |name, shape| HostTensor {
            name,
            dtype: DType::F32,
            shape,
            bytes: &bytes,
            order: RowOrder::Plain,
            reader: None,
        };
        let expert = |gate, up, down| ExpertSpec {
            gate: tensor("gate", gate),
            up: tensor("up", up),
            down: tensor("down", down),
            biases: None,
        };
        let (wide, tall): (&[usize], &[usize]) = (&[2, 3], &[3, 2]);
        let refused = |experts: &[ExpertSpec<'_>]| matches!(checked_experts(experts), Err(KernelError::Shape { .. }));
        assert!(!refused(&[expert(wide, wide, tall), expert(wide, wide, tall)]));
        assert!(refused(&[]));
        assert!(refused(&[expert(wide, tall, tall)]));
        assert!(refused(&[expert(wide, wide, wide)]));
        assert!(refused(&[expert(wide, wide, tall), expert(tall, tall, wide)]));
        assert!(refused(&[expert(&[6], &[6], &[6])]));
        // Biases, of 2, 2 and 3 values.
        let one = |name, shape: &'static [usize]| HostTensor { bytes: &bytes[..4 * shape[0]], ..tensor(name, shape) };
        let biased = |gate, up, down| ExpertSpec {
            biases: Some([one("gate bias", gate), one("up bias", up), one("down bias", down)]),
            ..expert(wide, wide, tall)
        };
        assert!(!refused(&[biased(&[2], &[2], &[3]), biased(&[2], &[2], &[3])]));
        assert!(refused(&[biased(&[3], &[2], &[3])]));
        assert!(refused(&[biased(&[2], &[3], &[3])]));
        assert!(refused(&[biased(&[2], &[2], &[2])]));
        assert!(refused(&[biased(&[2], &[2], &[3]), expert(wide, wide, tall)]));
        assert!(refused(&[expert(wide, wide, tall), biased(&[2], &[2], &[3])]));
    }
}
