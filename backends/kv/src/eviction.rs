//! Eviction order of idle blocks: least recently used, in two lists.
//!
//! *History* holds blocks that were written and never read again, *active* those that served at least one hit. Victims come
//! from history first, so one long document passing by does not push out the prefixes that everybody shares. Active is
//! capped; its oldest falls back into history, so yesterday's favourites leave too.
//!
//! Chains stay whole: sequences release their blocks last block first, and a block that is loaded takes the place just before its
//! parent, so a parent is always younger than its children and a hit on a child is a hit on its parents. Evicting by value (recompute seconds × reuse probability per byte) has to beat
//! this before it replaces it.
//!
//! Both lists are threaded through one table with an entry per page: every operation is O(1) and allocates nothing.

use crate::PageId;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Out,
    History,
    Active,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    younger: u32,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    youngest: u32,
    len: usize,
}

impl List {
    const EMPTY: List = List { oldest: NONE, youngest: NONE, len: 0 };
}

/// Idle blocks, in order of eviction.
#[derive(Debug)]
pub struct EvictionQueue {
    links: Vec<Link>,
    history: List,
    active: List,
    active_max: usize,
}

impl EvictionQueue {
    /// Creates the queue for pages `0..pages`; at most `active_max` of them are protected (0: plain least recently
    /// used).
    pub fn new(pages: usize, active_max: usize) -> Self {
        let link = Link { older: NONE, younger: NONE, place: Place::Out };
        Self { links: vec![link; pages], history: List::EMPTY, active: List::EMPTY, active_max }
    }

    /// Number of idle blocks in the queue: all that can be evicted.
    pub fn len(&self) -> usize {
        self.history.len + self.active.len
    }

    /// Returns true if no block can be evicted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a block that became idle. `reused`: it has served a hit.
    ///
    /// # Panics
    /// If the page is in the queue already (a bug of the pool).
    pub fn push(&mut self, page: PageId, reused: bool) {
        assert_eq!(self.links[page.index()].place, Place::Out, "page {page:?} is idle twice");
        if !reused || self.active_max == 0 {
            return self.append(page.0, Place::History);
        }
        self.append(page.0, Place::Active);
        if self.active.len > self.active_max {
            let oldest = self.active.oldest;
            self.unlink(oldest);
            self.append(oldest, Place::History);
        }
    }

    /// Adds a block that was never read, to be evicted just before its parent on the page `parent`. A parent elsewhere than in
    /// history stays longer anyway: then the block becomes the youngest of history.
    ///
    /// # Panics
    /// If the page is in the queue already (a bug of the pool).
    pub fn push_before(&mut self, page: PageId, parent: PageId) {
        assert_eq!(self.links[page.index()].place, Place::Out, "page {page:?} is idle twice");
        let Link { older, place, .. } = self.links[parent.index()];
        if place != Place::History {
            return self.append(page.0, Place::History);
        }
        self.history.len += 1;
        match older {
            NONE => self.history.oldest = page.0,
            older => self.links[older as usize].younger = page.0,
        }
        self.links[parent.index()].older = page.0;
        self.links[page.index()] = Link { older, younger: parent.0, place: Place::History };
    }

    /// Removes a block that is used again.
    ///
    /// # Panics
    /// If the page is not in the queue.
    pub fn remove(&mut self, page: PageId) {
        assert_ne!(self.links[page.index()].place, Place::Out, "page {page:?} is not idle");
        self.unlink(page.0);
    }

    /// Page of the next block to evict, which stays in the queue; `None` if there is no idle block.
    pub fn next(&self) -> Option<PageId> {
        let list = if self.history.len > 0 { self.history } else { self.active };
        (list.len > 0).then_some(PageId(list.oldest))
    }

    /// Takes the page of the next block to evict out of the queue; `None` if there is no idle block.
    pub fn pop(&mut self) -> Option<PageId> {
        let page = self.next()?;
        self.unlink(page.0);
        Some(page)
    }

    fn list(&mut self, place: Place) -> &mut List {
        match place {
            Place::History => &mut self.history,
            Place::Active => &mut self.active,
            Place::Out => unreachable!("a page outside has no list"),
        }
    }

    fn append(&mut self, page: u32, place: Place) {
        let list = self.list(place);
        let older = std::mem::replace(&mut list.youngest, page);
        list.len += 1;
        if older == NONE {
            list.oldest = page;
        } else {
            self.links[older as usize].younger = page;
        }
        self.links[page as usize] = Link { older, younger: NONE, place };
    }

    fn unlink(&mut self, page: u32) {
        let Link { older, younger, place } = self.links[page as usize];
        if older != NONE {
            self.links[older as usize].younger = younger;
        }
        if younger != NONE {
            self.links[younger as usize].older = older;
        }
        let list = self.list(place);
        list.len -= 1;
        if older == NONE {
            list.oldest = younger;
        }
        if younger == NONE {
            list.youngest = older;
        }
        self.links[page as usize] = Link { older: NONE, younger: NONE, place: Place::Out };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(queue: &mut EvictionQueue) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop()).map(|page| page.0).collect()
    }

    #[test]
    fn unused_blocks_go_before_reused_ones() {
        let mut queue = EvictionQueue::new(8, 4);
        queue.push(PageId(0), true);
        queue.push(PageId(1), false);
        queue.push(PageId(2), true);
        queue.push(PageId(3), false);
        assert_eq!(drain(&mut queue), [1, 3, 0, 2]);
        assert!(queue.is_empty());
    }

    #[test]
    fn protection_is_capped() {
        let mut queue = EvictionQueue::new(8, 2);
        for page in 0..4 {
            queue.push(PageId(page), true);
        }
        queue.push(PageId(4), false);
        assert_eq!(drain(&mut queue), [0, 1, 4, 2, 3]);
    }

    #[test]
    fn a_loaded_block_goes_before_its_parent_and_after_what_is_older() {
        let mut queue = EvictionQueue::new(8, 2);
        queue.push(PageId(0), false);
        queue.push(PageId(1), false);
        queue.push_before(PageId(2), PageId(1));
        queue.push_before(PageId(3), PageId(2));
        queue.push_before(PageId(4), PageId(0));
        assert_eq!((queue.len(), queue.next()), (5, Some(PageId(4))));
        queue.push(PageId(5), true);
        queue.push_before(PageId(6), PageId(5));
        queue.push_before(PageId(7), PageId(6));
        assert_eq!(drain(&mut queue), [4, 0, 3, 2, 1, 7, 6, 5], "a parent in active is younger than all of history");
        queue.push_before(PageId(1), PageId(0));
        queue.push_before(PageId(2), PageId(1));
        assert_eq!(drain(&mut queue), [2, 1], "a parent that is in use");
    }

    #[test]
    fn a_block_in_the_middle_leaves() {
        let mut queue = EvictionQueue::new(4, 0);
        (0..4).for_each(|page| queue.push(PageId(page), true));
        queue.remove(PageId(1));
        queue.remove(PageId(3));
        queue.push(PageId(1), false);
        assert_eq!(drain(&mut queue), [0, 2, 1]);
    }
}
