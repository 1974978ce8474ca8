//! Files: bytes that a client sent or that a batch made, never changed once they are there.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;

use crate::{FileId, Listing, Page, StoreError, Tenant};

/// Largest piece of one [`Files::append`], and about the largest row of a store.
pub const CHUNK_BYTES_MAX: usize = 256 * 1024;

/// What a new file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFile {
    /// As the API names it: `batch`, `user_data`.
    pub purpose: String,
    /// Name that the client gave.
    pub name: String,
    /// Size, known before its content.
    pub bytes: u64,
    /// Now, in Unix seconds.
    pub created: u64,
    /// When it is deleted by itself.
    pub expires: Option<u64>,
    /// Bytes that all files of the tenant may have together, this one included.
    pub tenant_bytes_max: u64,
    /// Files that the tenant may have, this one included.
    pub tenant_files_max: u64,
}

/// A complete file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRecord {
    /// Its id.
    pub id: FileId,
    /// As the API names it.
    pub purpose: String,
    /// Name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// Unix seconds.
    pub created: u64,
    /// When it is deleted by itself.
    pub expires: Option<u64>,
}

/// What became of a deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// It is gone.
    Yes,
    /// There is none.
    Absent,
    /// A batch that has not ended reads it.
    InUse,
}

/// Keeps files. A file is begun, appended to and sealed; before it is sealed nobody sees it, and what never is, is swept.
#[async_trait]
pub trait Files: Send + Sync + 'static {
    /// Begins a file.
    ///
    /// # Errors
    /// [`StoreError::Quota`] beyond the tenant's share; unsealed files count with their whole size.
    async fn begin_file(&self, tenant: &Tenant, new: NewFile) -> Result<FileId, StoreError>;

    /// Appends at most [`CHUNK_BYTES_MAX`]; `at` is the size so far.
    async fn append(&self, tenant: &Tenant, id: &FileId, at: u64, bytes: Bytes) -> Result<(), StoreError>;

    /// Makes the file visible; it has all its bytes.
    async fn seal(&self, tenant: &Tenant, id: &FileId) -> Result<FileRecord, StoreError>;

    /// A sealed file.
    async fn file(&self, tenant: &Tenant, id: &FileId) -> Result<Option<FileRecord>, StoreError>;

    /// Sealed files, all or of one purpose.
    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<&str>,
        page: &Page,
    ) -> Result<Listing<FileRecord>, StoreError>;

    /// Bytes of a sealed file; less than asked for only where the file ends. `None`: there is no such file.
    async fn read(&self, tenant: &Tenant, id: &FileId, range: Range<u64>) -> Result<Option<Bytes>, StoreError>;

    /// Deletes a file, sealed or not.
    async fn delete_file(&self, tenant: &Tenant, id: &FileId) -> Result<Deleted, StoreError>;

    /// Deletes files that have expired and are not in use, and unsealed ones begun before `unsealed_before`. How many.
    async fn sweep_files(&self, now: u64, unsealed_before: u64) -> Result<u64, StoreError>;
}
