//! Several payloads of a hostile publisher: nothing panics, and a cleared cache leaves nothing.

use penstock_proto::BlockHasher;
use penstock_router::foreign::{Events, ForeignEvent, Rehasher};
use penstock_router::{KvIndex, WorkerId};

use crate::prefixed;

const SERVER: WorkerId = WorkerId(0);

pub(crate) fn run(input: &[u8]) {
    let mut index = KvIndex::default();
    index.join(SERVER, 1000);
    let mut rehasher = Rehasher::new(BlockHasher::new(b"fuzz"));
    for payload in prefixed(input) {
        let events = Events::new(payload).into_iter().flatten().flatten().flatten();
        events.for_each(|event| rehasher.apply(&event, &mut index, SERVER));
    }
    rehasher.apply(&ForeignEvent::Cleared, &mut index, SERVER);
    assert_eq!((index.sizes(), index.shape(), rehasher.len()), ((0, 0), (0, 0), 0));
}
