//! KV blocks: state machine, pool, prefix index, eviction. Returns plans and is told outcomes; never copies bytes.
#![forbid(unsafe_code)]
