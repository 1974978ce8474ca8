//! A fake device that remembers every write, and whose logits are a hash of the prefix that it reads back.

use crate::random::mix;
use penstock_engine::{AfterLayer, Forward, Geometry, Pages};
use penstock_kernels::sampling::draw_from_all;
use penstock_kernels::{Found, KernelError, PAGE_TOKENS, Pick, SampledRows, StepBatch};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Token after which every row of a sequence is NaN.
pub const POISON: u32 = 0;

/// Counters of the fake's work, readable from outside.
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<[AtomicU64; 2]>);

impl Meter {
    /// Rows computed over all steps so far.
    pub fn rows(&self) -> u64 {
        self.0[0].load(Ordering::Relaxed)
    }

    /// Steps computed so far, each one call of `forward`.
    pub fn steps(&self) -> u64 {
        self.0[1].load(Ordering::Relaxed)
    }
}

/// Device without a model: each KV slot holds a hash of the tokens up to it, and every batch is checked for sound
/// block tables.
#[derive(Debug)]
pub struct FakeForward {
    geometry: Geometry,
    pages: Vec<[Option<Slot>; PAGE_TOKENS]>,
    logits: Vec<f32>,
    found: Vec<Found>,
    meter: Meter,
    /// Interval of device failures in steps; 0 means never.
    fail_every: u64,
    faults_left: u32,
    /// Number of steps after which every row is NaN.
    sound_steps: u64,
}

/// Most faults of one device: a device that never gets through a prompt would be resumed for ever.
const FAULTS_MAX: u32 = 5;

impl FakeForward {
    /// Creates a device of these sizes. `fail_every`: interval of failures in steps, 0 for none.
    pub fn new(geometry: Geometry, fail_every: u64) -> Self {
        let pages = vec![[None; PAGE_TOKENS]; geometry.pages];
        Self {
            geometry,
            pages,
            logits: Vec::new(),
            found: Vec::new(),
            meter: Meter::default(),
            fail_every,
            faults_left: FAULTS_MAX,
            sound_steps: u64::MAX,
        }
    }

    /// Creates a device whose weights are damaged after `sound_steps` steps.
    pub fn breaking(geometry: Geometry, sound_steps: u64) -> Self {
        Self { sound_steps, ..Self::new(geometry, 0) }
    }

    /// Counters of this device's work, which stay readable after the engine has taken the device.
    pub fn meter(&self) -> Meter {
        self.meter.clone()
    }

    /// Checks that spans cover the batch and that no sequence shares a page with a writer in this step.
    fn check(batch: &StepBatch<'_>) {
        let mut writers = HashMap::new();
        let mut next_row = 0;
        for (span_index, span) in batch.spans.iter().enumerate() {
            assert_eq!(span.rows.start, next_row, "spans cover the batch in order");
            assert!(!span.rows.is_empty(), "a span has rows");
            next_row = span.rows.end;
            for position in span.context - span.rows.len()..span.context {
                let page = span.block_table[position / PAGE_TOKENS];
                let writer = *writers.entry(page).or_insert(span_index);
                assert_eq!(writer, span_index, "page {page} has two writers in one step");
            }
        }
        assert_eq!(next_row, batch.tokens.len(), "spans cover the batch");
        for (span_index, span) in batch.spans.iter().enumerate() {
            for page in &span.block_table[..span.context.div_ceil(PAGE_TOKENS)] {
                let writer = writers.get(page).copied().unwrap_or(span_index);
                assert_eq!(writer, span_index, "page {page} is read while another sequence writes it");
            }
        }
    }

    /// Reads each sequence from its first token on, writes its new slots, and computes the logits of its sampled rows.
    fn compute(&mut self, batch: &StepBatch<'_>) {
        self.logits.clear();
        let mut sampled = batch.sampled.iter().copied().peekable();
        for span in batch.spans {
            let mut prefix = Prefix::default();
            let first = span.context - span.rows.len();
            for position in 0..span.context {
                let page = span.block_table[position / PAGE_TOKENS] as usize;
                let slot = &mut self.pages[page][position % PAGE_TOKENS];
                if position < first {
                    prefix.read(slot.expect("a slot is written before it is read"));
                    continue;
                }
                let row = span.rows.start + position - first;
                *slot = Some(prefix.write(batch.tokens[row], position));
                if sampled.next_if_eq(&row).is_some() {
                    prefix.logits(self.geometry.vocab_size, &mut self.logits);
                }
            }
        }
        assert_eq!(sampled.next(), None, "sampled rows are ascending and inside the batch");
    }
}

/// Token of the largest logit, if all logits are of use.
fn best(row: &[f32]) -> Option<u32> {
    let is_useless = |value: &f32| value.is_nan() || *value == f32::INFINITY;
    let best = (0..row.len()).reduce(|best, token| if row[token] > row[best] { token } else { best });
    best.filter(|best| row[*best] > f32::NEG_INFINITY && !row.iter().any(is_useless)).map(|best| best as u32)
}

impl Forward for FakeForward {
    fn geometry(&self) -> Geometry {
        Geometry { layers: 1, page_bytes: PAGE_BYTES, ..self.geometry.clone() }
    }

    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        assert!(batch.tokens.len() <= self.geometry.rows_max && batch.sampled.len() <= self.geometry.sampled_max);
        self.meter.0[0].fetch_add(batch.tokens.len() as u64, Ordering::Relaxed);
        let step = self.meter.0[1].fetch_add(1, Ordering::Relaxed) + 1;
        Self::check(batch);
        self.compute(batch);
        if step > self.sound_steps {
            self.logits.fill(f32::NAN);
        }
        if let Some(tell) = after_layer {
            tell(0, self);
        }
        if step.is_multiple_of(self.fail_every) && self.faults_left > 0 {
            self.faults_left -= 1;
            return Err(KernelError::Memory { what: "the simulated device", bytes: 1 });
        }
        Ok(&self.logits)
    }

    /// Finds tokens by itself in every second step.
    fn sample(
        &mut self,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        picks: &[Pick],
    ) -> Result<SampledRows<'_>, KernelError> {
        assert_eq!(picks.len(), batch.sampled.len(), "a way to the token for each sampled row");
        self.forward(batch, after_layer)?;
        if self.meter.steps().is_multiple_of(2) {
            return Ok(SampledRows::whole(&self.logits, picks.len()));
        }
        let vocab = self.geometry.vocab_size;
        let rows = picks.iter().zip(self.logits.chunks_exact(vocab)).enumerate();
        self.found.clear();
        self.found.extend(rows.map(|(number, (pick, row))| match *pick {
            Pick::Host => Found::Logits(number),
            Pick::Best => Found::Token(best(row)),
            Pick::Draw { scale, uniform } => {
                let draw = |best: u32| draw_from_all(row, row[best as usize], scale, uniform, &mut Vec::new());
                Found::Token(best(row).map(draw))
            }
        }));
        Ok(SampledRows::new(&self.logits, vocab, &self.found))
    }

    fn pages(&self) -> &dyn Pages {
        self
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        assert_eq!((layer, bytes.len()), (0, PAGE_BYTES), "the fake has one layer");
        let (slots, _) = bytes.as_chunks::<SLOT_BYTES>();
        for (slot, bytes) in self.pages[page as usize].iter_mut().zip(slots) {
            *slot = Slot::from_bytes(bytes);
        }
    }
}

impl Pages for FakeForward {
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
        assert_eq!((layer, out.len()), (0, PAGE_BYTES), "the fake has one layer");
        let (out, _) = out.as_chunks_mut::<SLOT_BYTES>();
        for (slot, out) in self.pages[page as usize].iter().zip(out) {
            *out = slot.map_or([0; SLOT_BYTES], Slot::to_bytes);
        }
    }
}

/// Content of a slot: like real keys and values it depends on the token, its position and everything before it.
#[derive(Clone, Copy, Debug)]
struct Slot {
    state: u64,
    poisoned: bool,
}

/// Bytes of a slot: the state, and a byte that says whether one exists and is poisoned.
const SLOT_BYTES: usize = 9;

/// Bytes of a page of the fake in its wire order.
pub const PAGE_BYTES: usize = PAGE_TOKENS * SLOT_BYTES;

impl Slot {
    fn to_bytes(self) -> [u8; SLOT_BYTES] {
        let mut bytes = [1 + u8::from(self.poisoned); SLOT_BYTES];
        bytes[..8].copy_from_slice(&self.state.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; SLOT_BYTES]) -> Option<Self> {
        let [state @ .., mark] = *bytes;
        (mark > 0).then(|| Slot { state: u64::from_le_bytes(state), poisoned: mark == 2 })
    }
}

/// Everything that a sequence has read so far.
#[derive(Default)]
struct Prefix {
    hash: u64,
    poisoned: bool,
}

impl Prefix {
    fn read(&mut self, slot: Slot) {
        self.hash = mix(self.hash ^ slot.state);
        self.poisoned |= slot.poisoned;
    }

    fn write(&mut self, token: u32, position: usize) -> Slot {
        let state = mix(self.hash.rotate_left(17) ^ (u64::from(token) << 32) ^ position as u64);
        let slot = Slot { state, poisoned: token == POISON };
        self.read(slot);
        slot
    }

    /// Writes coarse logits, so that ties occur.
    fn logits(&self, vocab_size: usize, out: &mut Vec<f32>) {
        let value = |token: usize| (mix(self.hash ^ token as u64) >> 57) as f32 / 16.0 - 4.0;
        let first = out.len();
        out.extend((0..vocab_size).map(|token| if self.poisoned { f32::NAN } else { value(token) }));
        if !self.poisoned {
            // Only a prompt can be poisoned.
            out[first + POISON as usize] = f32::NEG_INFINITY;
        }
    }
}
