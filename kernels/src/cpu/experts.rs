//! Mixtures of experts: the choice of experts, and their MLPs over the rows that chose them.
//!
//! Rows are copied into *slots*, sorted by expert, and the slots of one expert are a left operand of their own. So each expert's weights are
//! read once per step, and at decode only those of the experts that some row chose. Two runs of items over all experts:
//!
//! - gate and up: an item is (expert, some panels);
//! - down: an item is some panels, that is columns of the residual, of *all* experts in ascending order. Each output is added to its row as soon as it
//!   is computed, so nothing is stored per slot and a row's sum has one order, whatever the batch.
//!
//! A tile's bits do not depend on its height, so those of a row do not depend on who else chose its experts.

use std::ops::Range;

use super::integer::Form;
use super::integer::activations::Integral;
use super::layer::{activate, for_rows, put, vector_of};
use super::matmul::{Left, Matmul, Part, unit};
use super::operand::{Groups, Operand, Out, Shared};
use super::pack::{Packed, Section};
use super::pool::{Items, Pool};
use super::{Content, CpuDevice, Loaded};
use crate::device::{Activation, Buffer, Held, KernelError, RoutingSpec, Rows, Weight};
use crate::host::Arena;
use crate::source::CheckedExpert;

/// Packed experts of one layer, all of one shape.
pub(super) struct Experts {
    /// Gate and up of each expert, in shared panels.
    gate_up: Vec<Packed>,
    down: Vec<Packed>,
}

impl Experts {
    /// Packs the experts, equal in shape (checked).
    pub(super) fn pack(
        arena: &mut Arena,
        pool: &mut Pool,
        experts: Vec<CheckedExpert<'_>>,
        held: Held,
    ) -> Result<Self, KernelError> {
        let mut packed = Self { gate_up: Vec::new(), down: Vec::new() };
        for CheckedExpert { gate, up, down, biases } in experts {
            let (of_both, of_down) = biases.map(|[gate, up, down]| ([gate, up], down)).unzip();
            packed.gate_up.push(Packed::gate_up(arena, pool, gate, up, of_both, held)?);
            packed.down.push(Packed::stack(arena, pool, &[down], of_down, held)?);
        }
        Ok(packed)
    }

    /// True if a product with one of the matrices rounds its activations to integers.
    pub(super) fn has_integers(&self) -> bool {
        self.gate_up.iter().chain(&self.down).any(Packed::has_integers)
    }
}

/// The only section of a matrix that no other is stacked on.
pub(super) fn section(packed: &Packed) -> &Section {
    let [section] = packed.sections.as_slice() else { unreachable!("one matrix is one section") };
    section
}

/// Rows of a step, once for each expert that they chose, sorted by expert and then by row. Vectors are reused from step to step.
#[derive(Default)]
pub(super) struct Slots {
    /// Experts that some row chose, with their slots.
    active: Vec<(usize, Range<usize>)>,
    /// Row of each slot.
    rows: Vec<usize>,
    /// Index in `active` of each slot's expert.
    owner: Vec<usize>,
    /// Weight of the expert for the row of each slot.
    weights: Vec<f32>,
}

impl Slots {
    /// Sorts rows by expert. `routes`: `[rows]` of `stride` values, the first `experts` being weights.
    fn fill(&mut self, routes: &[f32], stride: usize, experts: usize) {
        self.active.clear();
        self.rows.clear();
        self.owner.clear();
        self.weights.clear();
        for expert in 0..experts {
            let first = self.rows.len();
            for (row, weights) in routes.chunks_exact(stride).enumerate() {
                if weights[expert] != 0.0 {
                    self.rows.push(row);
                    self.owner.push(self.active.len());
                    self.weights.push(weights[expert]);
                }
            }
            if self.rows.len() > first {
                self.active.push((expert, first..self.rows.len()));
            }
        }
    }
}

/// Left operands of all slots, in the forms that some expert's weights read.
#[derive(Clone, Copy)]
struct Lefts {
    half: Option<(Shared<u16>, usize)>,
    integral: Option<Integral>,
    rows_max: usize,
    integer_rows_max: usize,
}

impl Lefts {
    /// Operand of the slots of one expert.
    fn of(&self, slots: &Range<usize>) -> Left {
        let half = self.half.map(|(values, k_blocks)| {
            Operand::part(values, k_blocks, slots.start, Groups::new(slots.len(), self.rows_max))
        });
        let groups = Groups::new(slots.len(), self.integer_rows_max);
        Left { half, integral: self.integral.map(|integral| integral.part(slots.start, groups)) }
    }
}

/// Rows of f32 or of a bf16 operand, from which operands of slots are made.
#[derive(Clone, Copy)]
enum From {
    Singles(Shared<f32>, usize),
    Operand(Operand),
}

impl CpuDevice {
    pub(super) fn run_route(&mut self, out: Buffer, x: Buffer, router: Weight, routing: &RoutingSpec) {
        let experts = self.matrix(router).rows;
        assert_eq!(self.buffers[out.0 as usize].columns, experts, "columns of buffer {}", out.0);
        assert_eq!(self.rows_of(out), self.rows_of(x), "rows of buffers {} and {}", out.0, x.0);
        assert_ne!(out, x, "route in place");
        let left = self.left(x, router);
        self.buffers[out.0 as usize].content = Content::Single;
        let (rows, (values, stride), vector) = (self.rows_of(x), self.singles(out), self.vector);
        let Loaded::Matrix(packed) = &self.weights[router.0 as usize] else {
            panic!("weight {} is not linear", router.0)
        };
        let matmul = Matmul { kernel: &self.kernel, left, weight: packed, together: 1, added: None };
        matmul.run(&mut self.pool, &mut self.scratch, &|piece| {
            for (panel, row, line) in piece.lines() {
                // SAFETY: borrowed for this operation; a panel of a row is one thread's.
                let to = unsafe { values.slice(row * stride + panel * 32, 32) };
                put(vector, to.as_mut_array().expect("32 values"), line, packed.bias_of(panel));
            }
        });
        let correction = routing.correction.map(|correction| vector_of(&self.weights, correction, experts));
        for_rows(&mut self.pool, rows, stride * 8, &|row| {
            // SAFETY: borrowed for this operation; each row once.
            let values = unsafe { values.slice(row * stride, stride) };
            // SAFETY: the table is this machine's.
            unsafe { (vector.route)(values, experts, routing, correction) };
        });
    }

    pub(super) fn run_experts(
        &mut self,
        residual: Buffer,
        x: Buffer,
        routes: Buffer,
        experts: Weight,
        activation: Activation,
    ) {
        assert!(residual != x && residual != routes, "experts in place");
        let mut slots = std::mem::take(&mut self.slots);
        let stored = &self.buffers[routes.0 as usize];
        assert_eq!((stored.content, stored.domain), (Content::Single, Rows::Batch), "routes in buffer {}", routes.0);
        let (stride, columns) = (stored.stride(), stored.columns);
        let Loaded::Experts(Experts { gate_up, down }) = &self.weights[experts.0 as usize] else {
            panic!("weight {} is not a list of experts", experts.0)
        };
        assert_eq!(columns, gate_up.len(), "columns of buffer {}", routes.0);
        let [hidden, inner] = [gate_up[0].columns, gate_up[0].rows];
        let forms = [forms(gate_up), forms(down)];
        assert_eq!(self.buffers[x.0 as usize].columns, hidden, "columns of buffer {}", x.0);
        assert_eq!(self.buffers[residual.0 as usize].columns, hidden, "columns of buffer {}", residual.0);
        slots.fill(&stored.memory[..self.rows_of(routes) * stride], stride, columns);
        if !slots.rows.is_empty() {
            let from = match self.buffers[x.0 as usize].content {
                Content::Single => {
                    let (values, stride) = self.singles(x);
                    From::Singles(values, stride)
                }
                Content::Operand => From::Operand(self.operand_in(x, hidden)),
                Content::Queries => panic!("buffer {} holds queries, which only attention reads", x.0),
            };
            let left = self.slot_operands(&slots, &|slot| slots.rows[slot], from, hidden, forms[0]);
            let activated = self.run_slots_gate_up(&slots, left, experts, inner, activation);
            let left = match activated {
                From::Operand(operand) => Lefts {
                    half: Some((operand.values, operand.k_blocks)),
                    integral: None,
                    rows_max: self.kernel.rows_max,
                    integer_rows_max: self.kernel.integers.rows_max(),
                },
                From::Singles(..) => self.slot_operands(&slots, &|slot| slot, activated, inner, forms[1]),
            };
            self.run_slots_down(&slots, left, experts, residual);
        }
        self.slots = slots;
    }

    /// Operands of all slots, slot `i` being row `row_of(i)` of `from`, in the forms that are asked for.
    fn slot_operands(
        &mut self,
        slots: &Slots,
        row_of: &(dyn Fn(usize) -> usize + Sync),
        from: From,
        columns: usize,
        (has_halves, by_row): (bool, Option<bool>),
    ) -> Lefts {
        let (count, k_blocks, vector) = (slots.rows.len(), columns.div_ceil(32), self.vector);
        let half = has_halves.then(|| (Shared::new(self.converted.halves(count * k_blocks * 32)), k_blocks));
        let integer_rows_max = self.kernel.integers.rows_max();
        let groups = Groups::new(count, integer_rows_max);
        let integral = by_row.map(|by_row| self.integral.operand(groups, k_blocks, by_row));
        let lefts = Lefts { half, integral, rows_max: self.kernel.rows_max, integer_rows_max };
        for_rows(&mut self.pool, count, k_blocks * 32, &|slot| {
            let own = &slots.active[slots.owner[slot]].1;
            let (left, row) = (lefts.of(own), row_of(slot));
            if let From::Operand(operand) = from {
                let (from, to) = (operand.row(row), left.half.expect("weights of bf16").row(slot - own.start));
                for k in 0..k_blocks {
                    // SAFETY: other memory than `to`, and only read.
                    let from = unsafe { from.line(k) };
                    // SAFETY: borrowed for this operation; each slot once.
                    unsafe { to.line(k) }.copy_from_slice(from);
                }
                return;
            }
            let From::Singles(values, stride) = from else { unreachable!("checked above") };
            // SAFETY: borrowed for this operation, and only read.
            let x = unsafe { values.slice(row * stride, stride) };
            if let Some(half) = left.half {
                // SAFETY: the table is this machine's; each slot once.
                unsafe { (vector.narrow)(x, half.row(slot - own.start)) };
            }
            if let Some(integral) = left.integral {
                // SAFETY: the table is this machine's; each slot once.
                unsafe { (vector.quantize)(x, integral.row(slot - own.start)) };
            }
        });
        lefts
    }

    /// Activations of all slots, `[slots][inner]`: an operand of bf16, or f32 where the device holds integers.
    fn run_slots_gate_up(
        &mut self,
        slots: &Slots,
        left: Lefts,
        experts: Weight,
        inner: usize,
        activation: Activation,
    ) -> From {
        let Loaded::Experts(Experts { gate_up, .. }) = &self.weights[experts.0 as usize] else {
            unreachable!("run_experts() checked")
        };
        let (count, k_blocks) = (slots.rows.len(), inner.div_ceil(32));
        let memory = self.activated.singles(count * k_blocks * 32);
        let all = if self.writes_singles {
            From::Singles(Shared::new(memory), k_blocks * 32)
        } else {
            let groups = Groups::new(count, self.kernel.rows_max);
            From::Operand(Operand { values: Shared::halved(memory), groups, k_blocks })
        };
        let (vector, kernel) = (self.vector, &self.kernel);
        let out_of = |slots: &Range<usize>| match all {
            From::Singles(values, stride) => {
                Out::Singles { values: values.part(slots.start * stride, slots.len() * stride), stride }
            }
            From::Operand(operand) => {
                let groups = Groups::new(slots.len(), kernel.rows_max);
                Out::Operand(Operand::part(operand.values, k_blocks, slots.start, groups))
            }
        };
        let active = &slots.active;
        let panels = gate_up[0].panels;
        let widest = active.iter().map(|(expert, _)| section(&gate_up[*expert])).max_by_key(|s| s.panel_bytes());
        let unit = unit(widest.expect("a chosen expert"), panels * active.len(), 1, self.pool.threads()).min(panels);
        let units = panels.div_ceil(unit);
        let (items, scratch) = (Items::new(units * active.len()), Shared::new(&mut self.scratch));
        let bytes = count * panels * section(&gate_up[active[0].0]).panel_bytes();
        self.pool.run_if_worth(bytes, &|thread| {
            // SAFETY: borrowed for this run; each thread has its own.
            let scratch = &mut unsafe { scratch.slice(thread, 1) }[0];
            let panels = |item: usize| item % units * unit..((item % units + 1) * unit).min(panels);
            let mut next = items.take();
            while let Some(item) = next {
                next = items.take();
                let (expert, own) = &active[item / units];
                let packed = &gate_up[*expert];
                let after = next.map(|next| (section(&gate_up[active[next / units].0]), panels(next).start));
                let (part, out) = (Part::new(kernel, left.of(own), section(packed)), out_of(own));
                // SAFETY: the table is this machine's; some columns of a slot are one item's.
                part.panels(panels(item), after, scratch, &|piece| unsafe {
                    activate(vector, activation, packed, &out, piece)
                });
            }
        });
        all
    }

    /// Adds each slot's output, times its weight, to its row of `residual`.
    fn run_slots_down(&mut self, slots: &Slots, left: Lefts, experts: Weight, residual: Buffer) {
        let (values, stride) = self.singles(residual);
        let Loaded::Experts(Experts { down, .. }) = &self.weights[experts.0 as usize] else {
            unreachable!("run_experts() checked")
        };
        let (vector, kernel, active) = (self.vector, &self.kernel, &slots.active);
        let first = section(&down[active[0].0]);
        let panels = first.panels;
        let unit = unit(first, panels, 1, self.pool.threads());
        let (items, scratch) = (Items::new(panels.div_ceil(unit)), Shared::new(&mut self.scratch));
        self.pool.run_if_worth(slots.rows.len() * panels * first.panel_bytes(), &|thread| {
            // SAFETY: borrowed for this run; each thread has its own.
            let scratch = &mut unsafe { scratch.slice(thread, 1) }[0];
            while let Some(item) = items.take() {
                let panels = item * unit..((item + 1) * unit).min(panels);
                for (i, (expert, own)) in active.iter().enumerate() {
                    let packed = &down[*expert];
                    let part = Part::new(kernel, left.of(own), section(packed));
                    let after = active.get(i + 1).map(|(next, _)| (section(&down[*next]), panels.start));
                    part.panels(panels.clone(), after, scratch, &|piece| {
                        for (panel, i, line) in piece.lines() {
                            let slot = own.start + i;
                            // SAFETY: borrowed for this operation; a panel of a row is one item's.
                            let to = unsafe { values.slice(slots.rows[slot] * stride + panel * 32, 32) };
                            let to = to.as_mut_array().expect("32 values");
                            // SAFETY: the table is this machine's.
                            unsafe { (vector.add_weighted)(to, line, packed.bias_of(panel), slots.weights[slot]) };
                        }
                    });
                }
            }
        });
    }
}

/// Forms of the weights: true if some are bf16, and for those of integers whether activations have one scale per row.
fn forms(all: &[Packed]) -> (bool, Option<bool>) {
    let forms = all.iter().map(|packed| section(packed).form());
    let by_row = forms.clone().flatten().map(|form| form == Form::Rows).next();
    (forms.clone().any(|form| form.is_none()), by_row)
}
