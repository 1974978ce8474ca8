//! Connections live on the runtime that opened the store, whichever runtime happens to ask when one is made anew: the one that asks may
//! end before them.

use std::future::poll_fn;
use std::pin::pin;

use tokio::runtime::Handle;

/// `work`, with everything that it spawns and opens on `home`.
pub(crate) async fn at<T>(home: &Handle, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    poll_fn(|context| {
        let _home = home.enter();
        work.as_mut().poll(context)
    })
    .await
}
