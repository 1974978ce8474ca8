//! Parts of reports that may exceed one frame: the prefix cache of a worker with large tiers, and a step with many
//! outputs and changes of the cache.
//!
//! A part is far below [`FRAME_BYTES_MAX`], so that the other fields of its frame have room and a reader is not kept
//! long by one frame. Parts are applied in order; an index that has only some of them knows fewer blocks, and nothing wrong.

use crate::codec::FRAME_BYTES_MAX;
use crate::frames::{KvEvent, Output, Ready, Step};
use prost::{Message, length_delimiter_len};

/// Most bytes of block names and outputs in one frame; a single output above that has a frame of its own.
pub const PART_BYTES_MAX: usize = FRAME_BYTES_MAX / 4;

/// Bytes of one block's hash in a [`KvEvent`]: tag, length, and the hash.
const HASH_BYTES: usize = 18;

/// Splits the description of a worker into one that fits a frame, and steps with the rest of its prefix cache.
/// `number`: of the worker's last step.
pub fn split_ready(mut ready: Ready, number: u64) -> (Ready, Vec<Step>) {
    let mut parts = split_changes(std::mem::take(&mut ready.kv)).into_iter();
    ready.kv = parts.next().unwrap_or_default();
    let rest = parts.map(|kv| Step { number, state: ready.state.clone(), kv, ..Step::default() });
    let rest = rest.collect();
    (ready, rest)
}

/// Splits a step that may be too large for one frame: changes of the cache come before outputs, and the last part has
/// the step's batch. Cost of a step that fits: the computation of its length.
pub fn split_step(step: Step) -> Vec<Step> {
    if step.encoded_len() <= PART_BYTES_MAX {
        return vec![step];
    }
    let Step { number, outputs, state, kv, accepted, batch } = step;
    let part = |kv, outputs| Step { number, outputs, state: state.clone(), kv, accepted, batch: None };
    let mut told = Parts::default();
    outputs.into_iter().for_each(|output| told.add(output));
    let mut steps: Vec<Step> = split_changes(kv).into_iter().map(|kv| part(kv, Vec::<Output>::new())).collect();
    steps.extend(told.end().into_iter().map(|outputs| part(Vec::new(), outputs)));
    if let Some(last) = steps.last_mut() {
        last.batch = batch;
    }
    steps
}

/// Splits changes of a prefix cache into lists of at most [`PART_BYTES_MAX`] on the wire, in order.
fn split_changes(kv: Vec<KvEvent>) -> Vec<Vec<KvEvent>> {
    let mut parts = Parts::default();
    for event in kv {
        if event.encoded_len() <= PART_BYTES_MAX / 2 {
            parts.add(event);
        } else {
            split_event(event, PART_BYTES_MAX / 2 / HASH_BYTES, |piece| parts.add(piece));
        }
    }
    parts.end()
}

/// Splits one event into events of at most `hashes_max` blocks that have the same effect one after another.
fn split_event(event: KvEvent, hashes_max: usize, mut add: impl FnMut(KvEvent)) {
    let KvEvent { stored, removed, cleared, tier, mut parent } = event;
    if cleared {
        add(KvEvent { cleared, tier, ..KvEvent::default() });
    }
    for removed in removed.chunks(hashes_max) {
        add(KvEvent { removed: removed.to_vec(), tier, ..KvEvent::default() });
    }
    for stored in stored.chunks(hashes_max) {
        let next = stored.last().cloned().unwrap_or_default();
        let parent = std::mem::replace(&mut parent, next);
        add(KvEvent { stored: stored.to_vec(), tier, parent, ..KvEvent::default() });
    }
}

/// Messages of a repeated field in lists of at most [`PART_BYTES_MAX`].
struct Parts<M> {
    ended: Vec<Vec<M>>,
    open: Vec<M>,
    bytes: usize,
}

impl<M> Default for Parts<M> {
    fn default() -> Self {
        Self { ended: Vec::new(), open: Vec::new(), bytes: 0 }
    }
}

impl<M: Message> Parts<M> {
    fn add(&mut self, message: M) {
        let length = message.encoded_len();
        // A tag of one byte, the length, the message.
        let bytes = 1 + length_delimiter_len(length) + length;
        if self.bytes + bytes > PART_BYTES_MAX && !self.open.is_empty() {
            self.ended.push(std::mem::take(&mut self.open));
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.open.push(message);
    }

    fn end(mut self) -> Vec<Vec<M>> {
        if !self.open.is_empty() {
            self.ended.push(self.open);
        }
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlockHash;
    use crate::codec::{self, CodecError};
    use crate::frames::{Batch, EngineState};
    use bytes::BytesMut;

    /// Number of hashes of single blocks that exceed a frame: 40 bytes each.
    const MANY: u128 = 450_000;

    fn name(n: u128) -> Vec<u8> {
        BlockHash(n).to_bytes().to_vec()
    }

    /// Blocks as a cache without order reports them: each with a parent of its own.
    fn scattered() -> Vec<KvEvent> {
        let event = |n| KvEvent { stored: vec![name(2 * n)], parent: name(2 * n + 1), tier: 1, ..KvEvent::default() };
        std::iter::once(KvEvent { cleared: true, tier: 1, ..KvEvent::default() }).chain((0..MANY).map(event)).collect()
    }

    fn fits(message: &impl Message) -> bool {
        codec::encode(message, &mut BytesMut::new()).is_ok()
    }

    #[test]
    fn a_cache_that_exceeds_a_frame_is_told_whole_in_several() {
        let state = Some(EngineState { waiting: 3, ..EngineState::default() });
        let ready = Ready { kv: scattered(), state: state.clone(), pid: 7, ..Ready::default() };
        assert!(matches!(codec::encode(&ready, &mut BytesMut::new()), Err(CodecError::TooLarge { .. })));
        let (first, rest) = split_ready(ready, 9);
        assert!(fits(&first) && rest.iter().all(fits) && rest.len() > 2);
        assert_eq!((first.pid, &first.state), (7, &state));
        assert!(rest.iter().all(|step| (step.number, &step.state) == (9, &state)), "they are no news of the load");
        let told: Vec<KvEvent> = first.kv.into_iter().chain(rest.into_iter().flat_map(|step| step.kv)).collect();
        assert!(told == scattered(), "the same changes in the same order");
    }

    #[test]
    fn a_step_that_exceeds_a_frame_comes_in_several_with_its_outputs_last() {
        let (stored, removed): (Vec<_>, Vec<_>) = (0..MANY).map(|n| (name(2 * n), name(2 * n + 1))).unzip();
        let event = KvEvent { stored, removed, cleared: true, tier: 2, parent: name(u128::MAX) };
        let vector = vec![0.5; 1 << 20];
        let outputs: Vec<Output> =
            (0..5).map(|choice| Output { choice, vector: vector.clone(), ..Output::default() }).collect();
        let batch = Some(Batch { seconds: 0.5, ..Batch::default() });
        let step = Step { number: 4, accepted: 6, kv: vec![event.clone()], outputs, batch, ..Step::default() };
        assert!(!fits(&step));
        let parts = split_step(step);
        assert!(parts.iter().all(fits) && parts.iter().all(|part| (part.number, part.accepted) == (4, 6)));
        let batches: Vec<bool> = parts.iter().map(|part| part.batch.is_some()).collect();
        assert!(batches.iter().rev().skip(1).all(|is_there| !is_there) && batches.last() == Some(&true));
        let first_output = parts.iter().position(|part| !part.outputs.is_empty()).expect("there are outputs");
        assert!(parts[first_output..].iter().all(|part| part.kv.is_empty()), "changes of the cache come first");
        let choices: Vec<u32> = parts.iter().flat_map(|part| &part.outputs).map(|output| output.choice).collect();
        assert_eq!(choices, [0, 1, 2, 3, 4]);
        // The pieces of the event have its effect: cleared, then removed, then one chain.
        let told: Vec<&KvEvent> = parts.iter().flat_map(|part| &part.kv).collect();
        assert!(told[0].cleared && told[1..].iter().all(|piece| !piece.cleared));
        assert!(told.iter().all(|piece| piece.tier == 2));
        let mut tip = &event.parent;
        for piece in told.iter().filter(|piece| !piece.stored.is_empty()) {
            assert!(piece.removed.is_empty() && piece.parent == *tip);
            tip = piece.stored.last().expect("it has blocks");
        }
        assert!(told.iter().flat_map(|piece| &piece.removed).eq(&event.removed));
        assert!(told.iter().flat_map(|piece| &piece.stored).eq(&event.stored));
        assert!(
            told.iter().rposition(|piece| !piece.removed.is_empty()) < told.iter().position(|p| !p.stored.is_empty())
        );
    }

    #[test]
    fn a_step_that_fits_stays_whole() {
        let step =
            Step { number: 1, kv: vec![KvEvent::default()], outputs: vec![Output::default()], ..Step::default() };
        assert_eq!(split_step(step.clone()), [step]);
        let idle = Ready { pid: 1, ..Ready::default() };
        assert_eq!(split_ready(idle.clone(), 0), (idle, vec![]));
    }
}
