//! Home runtime of a store's connections: the one that opened the store. A connection that is opened later, during a
//! call from another runtime, must belong to the home runtime as well, since the caller's may end before the
//! connection.

use std::future::poll_fn;
use std::pin::pin;

use tokio::runtime::Handle;

/// Polls `work` within the runtime `home`, so that everything it spawns and opens belongs there.
pub(crate) async fn at<T>(home: &Handle, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    poll_fn(|context| {
        let _home = home.enter();
        work.as_mut().poll(context)
    })
    .await
}
