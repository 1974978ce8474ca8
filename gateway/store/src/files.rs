//! Files: bytes uploaded by a client or written by a batch, immutable once sealed.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;

use crate::{FileId, Listing, Page, StoreError, Tenant};

/// Largest piece of one [`Files::append`] in bytes, and about the largest row of a store.
pub const CHUNK_BYTES_MAX: usize = 256 * 1024;

/// Fields of a new file, known before its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFile {
    /// Purpose, as the API names it: `batch`, `user_data`.
    pub purpose: String,
    /// Name of the file, as the client gave it.
    pub name: String,
    /// Size in bytes, known before the content.
    pub bytes: u64,
    /// Time of creation in Unix seconds.
    pub created: u64,
    /// Time of automatic deletion in Unix seconds.
    pub expires: Option<u64>,
    /// Most bytes of all files of the tenant, this one included.
    pub tenant_bytes_max: u64,
    /// Most files of the tenant, this one included.
    pub tenant_files_max: u64,
}

/// Record of a sealed file, without its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRecord {
    /// Id of the file, as clients see it.
    pub id: FileId,
    /// Purpose of the file, as the API names it: `batch`, `user_data`.
    pub purpose: String,
    /// Name of the file, as the client gave it.
    pub name: String,
    /// Size of the content in bytes.
    pub bytes: u64,
    /// Time of creation in Unix seconds.
    pub created: u64,
    /// Time of automatic deletion in Unix seconds.
    pub expires: Option<u64>,
}

/// Outcome of the deletion of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// The file and its content are deleted.
    Yes,
    /// The tenant has no such file.
    Absent,
    /// The file is the input of an unfinished batch, and is therefore kept.
    InUse,
}

/// Store of files. A file is begun, appended to and sealed; until sealed it is invisible, and a file that is never
/// sealed is swept.
#[async_trait]
pub trait Files: Send + Sync + 'static {
    /// Begins a file.
    ///
    /// # Errors
    /// [`StoreError::Quota`] beyond the tenant's share; unsealed files count with their whole size.
    async fn begin_file(&self, tenant: &Tenant, new: NewFile) -> Result<FileId, StoreError>;

    /// Appends at most [`CHUNK_BYTES_MAX`]; `at` must be the size so far.
    async fn append(&self, tenant: &Tenant, id: &FileId, at: u64, bytes: Bytes) -> Result<(), StoreError>;

    /// Makes the file visible; all its bytes must have been appended.
    async fn seal(&self, tenant: &Tenant, id: &FileId) -> Result<FileRecord, StoreError>;

    /// Reads the record of a sealed file.
    async fn file(&self, tenant: &Tenant, id: &FileId) -> Result<Option<FileRecord>, StoreError>;

    /// Lists sealed files, all or of one purpose.
    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<&str>,
        page: &Page,
    ) -> Result<Listing<FileRecord>, StoreError>;

    /// Reads bytes of a sealed file; fewer than requested only at its end. `None`: no such file.
    async fn read(&self, tenant: &Tenant, id: &FileId, range: Range<u64>) -> Result<Option<Bytes>, StoreError>;

    /// Deletes a file, sealed or not: it is gone for the tenant at once, and its content is deleted in pieces, by the sweeper
    /// if not by this call.
    async fn delete_file(&self, tenant: &Tenant, id: &FileId) -> Result<Deleted, StoreError>;

    /// Deletes some files that have expired and are not in use, and unsealed ones begun before `unsealed_before`;
    /// returns their number.
    async fn sweep_files(&self, now: u64, unsealed_before: u64) -> Result<u64, StoreError>;
}
