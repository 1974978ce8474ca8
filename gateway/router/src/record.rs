//! Recorded decisions, for replay in a simulator: one JSON object per line.
//!
//! The first fields are those of a request trace (`timestamp`, `input_length`, `output_length`, `hash_ids`, `session`),
//! so a file of records is a trace. The rest is the decision, for comparison with a simulated one. No tokens, no text,
//! no names of keys: prefixes are ids without meaning outside of the file's gateway, tenants are numbers of the file.

use crate::explain::{Candidate, Explanation};
use crate::worker::WorkerView;
use penstock_proto::{BLOCK_TOKENS, BlockHash};
use serde::{Deserialize, Serialize};

/// Prompt tokens that one id of [`Record::hash_ids`] stands for.
pub const TRACE_BLOCK_TOKENS: usize = 512;

/// Record of one request and of the decision about it; see the module header.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Arrival, in milliseconds since the pool began.
    pub timestamp: u64,
    /// Number of tokens in the prompt.
    pub input_length: u32,
    /// Number of tokens in the answer.
    pub output_length: u32,
    /// One id per full block of [`TRACE_BLOCK_TOKENS`]: equal ids mean equal prefixes up to the end of the block.
    pub hash_ids: Vec<u64>,
    /// Hash of the conversation, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<u64>,
    /// Number of the tenant within the file.
    #[serde(default)]
    pub tenant: u32,
    /// Milliseconds that the request waited for a worker.
    #[serde(default)]
    pub waited_ms: f64,
    /// Index of the worker that the request was bound to, from 0.
    #[serde(default)]
    pub worker: u8,
    /// Predicted milliseconds from the binding to the first token.
    #[serde(default)]
    pub ttft_predicted_ms: f64,
    /// Measured milliseconds from the binding to the first token.
    #[serde(default)]
    pub ttft_ms: f64,
    /// Fitted speed of the worker: d, a, b, e, f of [`crate::fit`].
    #[serde(default)]
    pub speed: [f32; 5],
    /// Prompt tokens that a full step of the worker prefills.
    #[serde(default)]
    pub chunk: u32,
    /// Number of tokens for which the worker's KV cache has room.
    #[serde(default)]
    pub kv_tokens: u64,
    /// Most sequences that the worker runs at once.
    #[serde(default)]
    pub sequences_max: u32,
    /// All workers that suited the request, with their costs.
    #[serde(default)]
    pub candidates: Vec<Offer>,
}

/// Predicted cost of the request at one worker, with its parts in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// Index of the worker in the pool, from 0.
    pub worker: u8,
    /// True if the worker would have started the request at its next step.
    pub free: bool,
    /// Prompt tokens on the worker's device, promised ones included.
    pub cached: u32,
    /// Parts of the cost: queue, own, later, harm, decode, pressure.
    pub seconds: [f64; 6],
}

impl From<&Candidate> for Offer {
    fn from(candidate: &Candidate) -> Self {
        let parts = &candidate.parts;
        Self {
            worker: candidate.worker.0,
            free: candidate.free,
            cached: candidate.found.device + candidate.found.promised,
            seconds: [parts.queue, parts.own, parts.later, parts.harm, parts.decode, parts.pressure],
        }
    }
}

impl Record {
    /// Record of a decision about a prompt with these block hashes.
    pub fn new(explanation: &Explanation, hashes: &[BlockHash]) -> Self {
        let every = TRACE_BLOCK_TOKENS / BLOCK_TOKENS;
        let choice = explanation.choice();
        Self {
            timestamp: explanation.at.saturating_sub(explanation.waited).as_millis() as u64,
            input_length: explanation.tokens,
            hash_ids: hashes.chunks_exact(every).map(|blocks| blocks[every - 1].0 as u64).collect(),
            waited_ms: explanation.waited.as_secs_f64() * 1e3,
            worker: choice.map_or(0, |choice| choice.worker.0),
            ttft_predicted_ms: choice.map_or(0.0, |choice| choice.ttft * 1e3),
            candidates: explanation.candidates.iter().map(Offer::from).collect(),
            ..Self::default()
        }
    }

    /// Adds the speed and size of the worker.
    #[must_use]
    pub(crate) fn at(self, worker: &WorkerView) -> Self {
        Self {
            speed: worker.fit.coefficients().map(|one| one as f32),
            chunk: worker.fit.chunk() as u32,
            kv_tokens: u64::from(worker.member.blocks_total) * BLOCK_TOKENS as u64,
            sequences_max: worker.member.sequences_max,
            ..self
        }
    }

    /// Line of the file for the record, without its line break.
    pub fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;
    use crate::{WorkerId, explain::Why};
    use penstock_proto::RequestId;
    use std::time::Duration;

    #[test]
    fn a_record_is_a_line_of_a_trace_and_comes_back() {
        let candidate = Candidate { worker: WorkerId(3), ttft: 0.25, ..Candidate::default() };
        let explanation = Explanation {
            request: RequestId(7),
            at: Duration::from_millis(1500),
            waited: Duration::from_millis(500),
            tokens: 1100,
            policy: Policy::CacheAware,
            candidates: vec![candidate],
            chosen: Some(0),
            why: Why::Only,
        };
        let hashes: Vec<BlockHash> = (0..34).map(BlockHash).collect();
        let record = Record { output_length: 9, ..Record::new(&explanation, &hashes) };
        assert_eq!((record.timestamp, record.hash_ids.as_slice(), record.worker), (1000, &[15, 31][..], 3));
        let line = record.line();
        assert!(
            line.starts_with("{\"timestamp\":1000,\"input_length\":1100,\"output_length\":9,\"hash_ids\":[15,31],"),
            "{line}"
        );
        assert_eq!(serde_json::from_str::<Record>(&line).expect("its own"), record);
        let bare = r#"{"timestamp": 5, "input_length": 3, "output_length": 2, "hash_ids": []}"#;
        assert_eq!(serde_json::from_str::<Record>(bare).expect("a trace's line").input_length, 3);
    }
}
