//! Tests of every rule of the relay, against doubles and a clock of their own: no waiting, no runtime.

mod any;
mod attack;
mod cache;
mod double;
mod fallback;
mod health;
mod hedge;
mod pick;
mod serving;
