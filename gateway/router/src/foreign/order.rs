//! Sequence numbers of a publisher: next, repeated and missing batches.

/// Position of a received batch in its publisher's sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The batch has the next number, and is to be applied.
    Next,
    /// The batch was received before, and is to be skipped.
    Old,
    /// Batches are missing before this one, from the number in the field on.
    Gap(u64),
    /// The publisher counts from the beginning again: it is another process, and everything it held is gone.
    Restart,
}

/// Sequence number that the next batch of a publisher should have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Order {
    next: Option<u64>,
}

/// Distance below the expected number above which a batch is not old but from a new life of the publisher. (A new life
/// with a nearer number comes with a new connection, where [`Order::forget`] is due.)
const OLD_MAX: u64 = 1000;

impl Order {
    /// Position of a batch. After applying the batch, the caller reports it with [`Self::took`].
    pub fn look(&self, sequence: u64) -> Turn {
        match self.next {
            // A subscriber that joins late does not know the batches before.
            None if sequence == 0 => Turn::Next,
            None => Turn::Gap(0),
            Some(next) if sequence == next => Turn::Next,
            Some(next) if sequence > next => Turn::Gap(next),
            Some(next) if next - sequence > OLD_MAX => Turn::Restart,
            Some(_) => Turn::Old,
        }
    }

    /// Sequence number that the next batch should have; 0 before the first batch.
    pub fn next(&self) -> u64 {
        self.next.unwrap_or(0)
    }

    /// Notes that a batch was applied.
    pub fn took(&mut self, sequence: u64) {
        self.next = Some(sequence.saturating_add(1));
    }

    /// Forgets the position, as at a new connection.
    pub fn forget(&mut self) {
        self.next = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_publisher_is_followed() {
        let mut order = Order::default();
        assert_eq!((order.look(0), order.look(7)), (Turn::Next, Turn::Gap(0)));
        order.took(0);
        order.took(1);
        assert_eq!((order.look(2), order.look(5), order.look(1)), (Turn::Next, Turn::Gap(2), Turn::Old));
        assert_eq!(order.look(0), Turn::Old);
        order.took(5000);
        assert_eq!((order.look(4990), order.look(3)), (Turn::Old, Turn::Restart));
        order.forget();
        assert_eq!(order.look(3), Turn::Gap(0));
    }
}
