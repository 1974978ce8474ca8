//! Value that is replaced as a whole while others work with it.

use std::sync::Arc;

use arc_swap::ArcSwap;

/// TLS of a listener, made anew when the authorities of its clients are others. A handshake takes all of one: the certificates that
/// vouch for clients, and the sessions that clients resume without showing their certificate again.
pub struct Renewed<T>(ArcSwap<T>);

impl<T> Renewed<T> {
    /// First value.
    pub fn new(first: T) -> Arc<Self> {
        Arc::new(Self(ArcSwap::from_pointee(first)))
    }

    /// Value in use now.
    pub fn now(&self) -> Arc<T> {
        self.0.load_full()
    }

    /// Puts another value in use; who has taken the one before keeps it.
    pub fn renew(&self, next: T) {
        self.0.store(Arc::new(next));
    }
}
