//! Tests that hold the house rules.
