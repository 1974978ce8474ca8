//! Stored objects that clients list and label: chat completions and conversations, with the items of conversations.
//!
//! Objects share the bounds, the eviction and the retention of stored responses ([`crate::Responses`]): bytes of all
//! kinds are counted together. A conversation counts its items, and becomes the newest object of its tenant with each
//! item that is added, so a conversation in use is the last to make room.

use async_trait::async_trait;
use bytes::Bytes;

use crate::ids::{is_id, random};
use crate::{Listing, Page, RESPONSE_ROW_BYTES, ResponseRoom, StoreError, Tenant};

/// Kind of a stored object, named by the prefix of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectKind {
    /// Chat completion with the messages that it answered.
    Completion,
    /// Conversation, which holds items.
    Conversation,
}

impl ObjectKind {
    /// Prefix of the ids of this kind.
    pub fn prefix(self) -> &'static str {
        match self {
            ObjectKind::Completion => "chatcmpl-",
            ObjectKind::Conversation => "conv_",
        }
    }

    /// Number of the kind in the databases; 0 is a response.
    pub(crate) fn number(self) -> i64 {
        match self {
            ObjectKind::Completion => 1,
            ObjectKind::Conversation => 2,
        }
    }
}

/// Id of a stored object: the prefix of its kind and random characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    kind: ObjectKind,
    text: String,
}

impl ObjectId {
    /// Generates a new id from random bytes.
    pub fn random(kind: ObjectKind) -> Self {
        Self { kind, text: random(kind.prefix()) }
    }

    /// Parses a client's text; `None` if it cannot be an id of this kind.
    pub fn parse(kind: ObjectKind, text: &str) -> Option<Self> {
        is_id(text, kind.prefix()).then(|| Self { kind, text: text.to_owned() })
    }

    /// Kind of the object that the id names.
    pub fn kind(&self) -> ObjectKind {
        self.kind
    }

    /// Id as clients see it, prefix included.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl std::fmt::Display for ObjectId {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.text)
    }
}

/// Stored object. All documents are JSON text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRecord {
    /// Id of the object, as clients see it.
    pub id: ObjectId,
    /// Time of creation in Unix seconds.
    pub created: u64,
    /// Time of automatic deletion in Unix seconds.
    pub expires: u64,
    /// Name of the model that a completion was asked from; empty for a conversation.
    pub model: String,
    /// The client's labels: an object of strings, compact, with sorted names.
    pub metadata: String,
    /// Document of the object, without its metadata.
    pub body: Bytes,
    /// List of the messages that a completion answered; empty for a conversation.
    pub input: Bytes,
}

impl ObjectRecord {
    /// Bytes that the object counts against bounds, without the items of a conversation.
    pub fn bytes(&self) -> u64 {
        RESPONSE_ROW_BYTES + (self.model.len() + self.metadata.len() + self.body.len() + self.input.len()) as u64
    }
}

/// Filter of a list of objects; the default admits all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectFilter {
    /// Name of the model; `None`: any.
    pub model: Option<String>,
    /// Metadata entries that an object must have, each as the compact JSON text `"name":"value"`.
    pub metadata: Vec<String>,
}

/// Item of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Id of the item, unique within its conversation.
    pub id: String,
    /// The item, JSON text that holds its id.
    pub json: Bytes,
}

/// Bytes that an item counts besides its text: ids and index entries.
pub const ITEM_ROW_BYTES: u64 = 128;

impl Item {
    /// Bytes that the item counts against bounds.
    pub fn bytes(&self) -> u64 {
        ITEM_ROW_BYTES + self.json.len() as u64
    }
}

/// Outcome of a change to the items of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The change is made.
    Done,
    /// The tenant has no such conversation.
    Absent,
    /// Somebody else holds the conversation.
    Locked,
    /// The conversation has no such item.
    NoItem,
    /// The conversation has an item of that id already.
    Taken,
}

/// Store of chat completions and conversations, which clients list, label, read and delete by id.
#[async_trait]
pub trait Objects: Send + Sync + 'static {
    /// Stores a new object, with the items of a conversation. Room is made before anything is written, as by
    /// [`crate::Responses::save_response`].
    ///
    /// # Errors
    /// [`StoreError::Quota`] if there is no room; then nothing is deleted. [`StoreError::Misuse`] for two items of one
    /// id.
    async fn save_object(
        &self,
        tenant: &Tenant,
        object: ObjectRecord,
        items: Vec<Item>,
        room: ResponseRoom,
    ) -> Result<(), StoreError>;

    /// Reads one object of the tenant; `None`: no such object.
    async fn object(&self, tenant: &Tenant, id: &ObjectId) -> Result<Option<ObjectRecord>, StoreError>;

    /// Lists the tenant's objects of a kind, by the time of their creation: as many as fit into `bytes_max`, at least
    /// one.
    async fn objects(
        &self,
        tenant: &Tenant,
        kind: ObjectKind,
        filter: &ObjectFilter,
        page: &Page,
        bytes_max: u64,
    ) -> Result<Listing<ObjectRecord>, StoreError>;

    /// Replaces the metadata of an object. `false`: no such object.
    ///
    /// # Errors
    /// [`StoreError::Quota`] if there is no room for more metadata; then nothing is changed.
    async fn label_object(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        metadata: &str,
        room: ResponseRoom,
    ) -> Result<bool, StoreError>;

    /// Deletes an object and its items. `false`: no such object.
    async fn delete_object(&self, tenant: &Tenant, id: &ObjectId) -> Result<bool, StoreError>;

    /// Takes or renews the lock of a conversation for `holder`, from `now` to `until` (Unix seconds): nobody else
    /// changes its items meanwhile.
    async fn hold_conversation(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        holder: &str,
        now: u64,
        until: u64,
    ) -> Result<Change, StoreError>;

    /// Gives the lock of a conversation up, if `holder` has it.
    async fn release_conversation(&self, tenant: &Tenant, id: &ObjectId, holder: &str) -> Result<(), StoreError>;

    /// Reads all items of a conversation, oldest first. `None`: no such conversation.
    ///
    /// # Errors
    /// [`StoreError::Quota`] if it has more than `items_max` items or `bytes_max` bytes.
    async fn all_items(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        items_max: u64,
        bytes_max: u64,
    ) -> Result<Option<Vec<Item>>, StoreError>;

    /// Lists items of a conversation: as many as fit into `bytes_max`, at least one. `None`: no such conversation.
    async fn items(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        page: &Page,
        bytes_max: u64,
    ) -> Result<Option<Listing<Item>>, StoreError>;

    /// Reads one item. `None`: no such conversation, or no such item in it.
    async fn item(&self, tenant: &Tenant, id: &ObjectId, item: &str) -> Result<Option<Item>, StoreError>;

    /// Adds items at the end of a conversation, which expires at `append.expires` from then on, and gives the lock up if
    /// `append.holder` has it.
    ///
    /// # Errors
    /// [`StoreError::Quota`] if there is no room, or the conversation has too many items; then nothing is changed.
    async fn append_items(&self, tenant: &Tenant, id: &ObjectId, append: Append) -> Result<Change, StoreError>;

    /// Deletes an item, unless somebody holds the conversation at `now`.
    async fn delete_item(&self, tenant: &Tenant, id: &ObjectId, item: &str, now: u64) -> Result<Change, StoreError>;
}

/// Items to add to a conversation, with the bounds that they must fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Append {
    /// Holder of the conversation's lock; `None`: a change that needs no lock, and is refused while there is one.
    pub holder: Option<String>,
    /// Items to add, in order.
    pub items: Vec<Item>,
    /// Time of the change in Unix seconds.
    pub now: u64,
    /// Time of the conversation's automatic deletion from now on, in Unix seconds.
    pub expires: u64,
    /// Most items that the conversation may have.
    pub items_max: u64,
    /// Bounds by which room is made.
    pub room: ResponseRoom,
}
