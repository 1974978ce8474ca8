//! Inventory: batches and files of all tenants, for the operator. No content is read.

use async_trait::async_trait;

use crate::{BatchRecord, FileRecord, Listing, Page, StoreError, Tenant};

/// Objects of an inventory: all, those of one tenant, or one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InventoryFilter {
    /// Tenant that owns the objects; `None`: any.
    pub tenant: Option<Tenant>,
    /// Id of the only object; `None`: any.
    pub id: Option<String>,
    /// True for batches that have not ended alone; of no effect on files.
    pub is_open: bool,
}

/// Batch with its tenant, and the bytes that it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedBatch {
    /// Tenant that created the batch.
    pub tenant: Tenant,
    /// Record of the batch, as the store keeps it.
    pub batch: BatchRecord,
    /// Size of the input file; `None`: the file is deleted.
    pub input_bytes: Option<u64>,
    /// Bytes of all results so far, or of the files of results.
    pub output_bytes: u64,
}

/// File with its tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedFile {
    /// Tenant that owns the file.
    pub tenant: Tenant,
    /// Record of the file.
    pub file: FileRecord,
    /// True while a batch that has not ended reads the file, which cannot be deleted then.
    pub is_in_use: bool,
}

/// Lists across tenants, for the operator of the gateway and never for clients.
#[async_trait]
pub trait Inventory: Send + Sync + 'static {
    /// Lists batches by the time of their creation.
    async fn all_batches(&self, filter: &InventoryFilter, page: &Page) -> Result<Listing<OwnedBatch>, StoreError>;

    /// Lists sealed files by the time of their creation, without those that belong to batches of messages.
    async fn all_files(&self, filter: &InventoryFilter, page: &Page) -> Result<Listing<OwnedFile>, StoreError>;
}
