//! Lists in pages, by the order in which their items were made.

/// Which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Oldest first.
    Ascending,
    /// Newest first.
    #[default]
    Descending,
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Behind the item with this id. One that is not there is an empty page.
    pub after: Option<String>,
    /// Items at most.
    pub limit: u32,
    /// Which way.
    pub order: Order,
}

/// Items of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing<T> {
    /// The items.
    pub items: Vec<T>,
    /// Whether there are items behind them.
    pub more: bool,
}
