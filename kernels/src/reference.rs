//! The oracle: every operation in plain f32 loops.
