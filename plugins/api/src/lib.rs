//! What a plugin sees and may answer: hooks, contexts, verdicts.
#![forbid(unsafe_code)]
