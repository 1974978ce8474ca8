//! Ids of the contract as types, so that no two of them can be taken for each other.
//!
//! On the wire all of them are varints ([`frames`](crate::frames) has `u64` fields); each end makes the id when it takes
//! a frame in and unwraps it when it makes a frame. A log line shows the bare number.

use std::fmt;

/// Defines an id around a `u64` that is shown as the bare number.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(out)
            }
        }
    };
}

id! {
    /// Number of a request in its pool, counted by the gateway from 1. Workers know it per session.
    RequestId
}

id! {
    /// Number of a session between a gateway and a worker. Each end counts for itself, and the number does not travel.
    SessionId
}

id! {
    /// Random id of one gateway process, told to workers in the hello.
    GatewayId
}

id! {
    /// Random id of one life of a worker process, by which lives at one address are told apart; 0: no life yet.
    Epoch
}

id! {
    /// Number of a pull of KV blocks that a gateway asked a worker for, counted by the pool from 1.
    PullId
}

id! {
    /// Number of work in one worker's engine, counted by the worker from 1: a request of any session, or a KV transfer. It
    /// does not travel.
    WorkId
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::{Cancel, Generate, Hello, Pull, Pulled, Ready};
    use prost::Message;

    #[track_caller]
    fn check(frame: &impl Message, expected: &[u8]) {
        assert_eq!(frame.encode_to_vec(), expected);
    }

    #[test]
    fn ids_travel_as_the_varints_that_they_have_always_been() {
        // Field number << 3 for a varint, then 300 as a varint.
        check(&Cancel { request: RequestId(300).0, ..Cancel::default() }, &[1 << 3, 0xac, 0x02]);
        check(&Generate { request: RequestId(300).0, ..Generate::default() }, &[1 << 3, 0xac, 0x02]);
        check(&Pull { id: PullId(300).0, ..Pull::default() }, &[1 << 3, 0xac, 0x02]);
        check(&Pulled { id: PullId(300).0, ..Pulled::default() }, &[1 << 3, 0xac, 0x02]);
        check(&Hello { gateway: GatewayId(300).0, ..Hello::default() }, &[2 << 3, 0xac, 0x02]);
        check(&Ready { epoch: Epoch(300).0, ..Ready::default() }, &[2 << 3, 0xac, 0x02]);
    }

    #[test]
    fn an_id_is_shown_as_its_number() {
        assert_eq!(format!("{} {:>4}", RequestId(7), SessionId(12)), "7   12");
    }
}
