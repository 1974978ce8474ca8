//! Pages of lists, by the order in which items were created.

/// Order of a list, by the creation of its items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The oldest item comes first.
    Ascending,
    /// The newest item comes first.
    #[default]
    Descending,
}

/// Request for one page of a list: its place, length and order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Id of the last item of the previous page. An unknown id gives an empty page.
    pub after: Option<String>,
    /// Most items on the page.
    pub limit: u32,
    /// Order of the items on the page and from page to page.
    pub order: Order,
}

/// Items of one page, and whether more follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing<T> {
    /// Items of the page, in its order.
    pub items: Vec<T>,
    /// True if more items follow behind the page.
    pub more: bool,
}
