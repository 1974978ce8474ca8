//! Routes of `/v1/files`.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, header};
use penstock_proto::ErrorKind;
use penstock_store::{CHUNK_BYTES_MAX, Deleted, FileId, FileRecord, NewFile, Tenant};
use penstock_types::ApiError;

use super::{Visit, absent, answer, failed, json};
use crate::handler::End;
use crate::list_query as query;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;
use penstock_http::multipart::{self, Part};

/// Purposes that a client can give a file. The gateway's own (`batch_output`) is not among them.
const PURPOSES: [&str; 6] = ["batch", "user_data", "assistants", "vision", "evals", "fine-tune"];
/// Most parts of the multipart form of an upload.
const PARTS_MAX: usize = 16;
/// Longest name of an uploaded file, in bytes.
const NAME_BYTES_MAX: usize = 512;
/// Most files that one key can have in the store.
pub(crate) const FILES_MAX: u64 = 10_000;
/// Bounds of `expires_after[seconds]`, as the API sets them.
pub(super) const EXPIRY_SECONDS: std::ops::RangeInclusive<u64> = 3600..=2_592_000;
/// Bytes read from the store for one write to the client.
const READ_BYTES: u64 = CHUNK_BYTES_MAX as u64;

/// Fields of the multipart form that uploads a file.
struct Upload {
    purpose: String,
    name: String,
    content: Bytes,
    expires: Option<u64>,
}

pub(super) async fn upload(visit: &mut Visit<'_>) -> Result<(), End> {
    let boundary = boundary(&visit.exchange.head.headers)?;
    let limits = visit.gateway.serving().config.store.clone();
    let body = visit.exchange.read_body(&visit.gateway.bodies).await?;
    let upload = read_form(&body.bytes, &boundary).map_err(Failure::from)?;
    if upload.content.len() as u64 > limits.file_bytes_max {
        let message = format!("A file may have {} bytes.", limits.file_bytes_max);
        return Err(Failure::new(ErrorKind::TooLarge, message).param("file").into());
    }
    let now = unix_seconds();
    let new = NewFile {
        purpose: upload.purpose,
        name: upload.name,
        bytes: upload.content.len() as u64,
        created: now,
        expires: upload.expires.map(|seconds| now + seconds),
        tenant_bytes_max: limits.key_bytes_max,
        tenant_files_max: FILES_MAX,
    };
    let record = put(visit, new, upload.content).await?;
    drop(body.lease);
    answer(visit.exchange, &json::file(&record)).await
}

/// Writes a file to the store whole; one that fails midway is deleted.
pub(super) async fn put(visit: &Visit<'_>, new: NewFile, mut content: Bytes) -> Result<FileRecord, Failure> {
    let (store, tenant) = (&visit.keeper.store, &visit.tenant);
    let id = store.begin_file(tenant, new).await.map_err(failed)?;
    let write = async {
        let mut at = 0;
        while !content.is_empty() {
            let piece = content.split_to(content.len().min(CHUNK_BYTES_MAX));
            let size = piece.len() as u64;
            store.append(tenant, &id, at, piece).await?;
            at += size;
        }
        store.seal(tenant, &id).await
    };
    match write.await {
        Ok(record) => Ok(record),
        Err(error) => {
            // A failed delete is repeated by the sweeper.
            let _ = store.delete_file(tenant, &id).await;
            Err(failed(error))
        }
    }
}

fn boundary(headers: &HeaderMap) -> Result<String, Failure> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.and_then(multipart::boundary).ok_or_else(|| {
        let message = "The body must be a form: send \"Content-Type: multipart/form-data; boundary=…\".";
        Failure::new(ErrorKind::UnsupportedMedia, message)
    })
}

fn read_form(body: &Bytes, boundary: &str) -> Result<Upload, ApiError> {
    let parts = multipart::parts(body, boundary, PARTS_MAX);
    let parts = parts.map_err(|why| ApiError::malformed(format!("The form cannot be read: {why}.")))?;
    let one = |name: &str| -> Result<Option<&Part>, ApiError> {
        let mut found = parts.iter().filter(|part| part.name == name);
        let first = found.next();
        if found.next().is_some() {
            return Err(ApiError::invalid(name, format!("{name}: given twice")));
        }
        Ok(first)
    };
    let text = |name: &str| -> Result<Option<String>, ApiError> {
        let part = one(name)?;
        let text =
            part.map(|part| std::str::from_utf8(&body[part.at.clone()]).map(|text| text.trim().to_owned())).transpose();
        text.map_err(|_| ApiError::invalid(name, format!("{name}: must be text")))
    };
    let file = one("file")?.ok_or_else(|| ApiError::invalid("file", "file: required, but missing"))?;
    let purpose = text("purpose")?.ok_or_else(|| ApiError::invalid("purpose", "purpose: required, but missing"))?;
    if !PURPOSES.contains(&purpose.as_str()) {
        return Err(ApiError::invalid("purpose", format!("purpose: must be one of {}", PURPOSES.join(", "))));
    }
    let name = file.file_name.clone().unwrap_or_default();
    if name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        return Err(ApiError::invalid(
            "file",
            format!("file: its name must be text of at most {NAME_BYTES_MAX} bytes"),
        ));
    }
    let expires = expiry(text("expires_after[anchor]")?.as_deref(), text("expires_after[seconds]")?.as_deref())?;
    Ok(Upload { purpose, name, content: body.slice(file.at.clone()), expires })
}

fn expiry(anchor: Option<&str>, seconds: Option<&str>) -> Result<Option<u64>, ApiError> {
    let fault = |message: String| Err(ApiError::invalid("expires_after", format!("expires_after: {message}")));
    match (anchor, seconds.map(str::parse)) {
        (None, None) => Ok(None),
        (Some("created_at"), Some(Ok(seconds))) if EXPIRY_SECONDS.contains(&seconds) => Ok(Some(seconds)),
        (Some("created_at"), _) => {
            fault(format!("seconds must be {} to {}", EXPIRY_SECONDS.start(), EXPIRY_SECONDS.end()))
        }
        _ => fault("anchor must be created_at".into()),
    }
}

pub(super) async fn list(visit: &mut Visit<'_>) -> Result<(), End> {
    let page = query::page(&visit.exchange.head.target, 10_000, 10_000).map_err(Failure::from)?;
    let purpose = query::value(&visit.exchange.head.target, "purpose").map_err(Failure::from)?;
    let listing = visit.keeper.store.files(&visit.tenant, purpose.as_deref(), &page).await.map_err(failed)?;
    answer(visit.exchange, &json::list(&listing, |file| file.id.as_str(), json::file)).await
}

async fn find(visit: &Visit<'_>, id: &str) -> Result<FileRecord, Failure> {
    let known = FileId::parse(id).ok_or_else(|| absent("File", id))?;
    let found = visit.keeper.store.file(&visit.tenant, &known).await.map_err(failed)?;
    found.filter(|file| !file.purpose.starts_with('.')).ok_or_else(|| absent("File", id))
}

pub(super) async fn show(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let record = find(visit, id).await?;
    answer(visit.exchange, &json::file(&record)).await
}

/// Sends a file piece by piece: a slow reader holds one piece in memory.
pub(super) async fn content(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let record = find(visit, id).await?;
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream")),
        // A browser must not take a client's upload for a page of this gateway.
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment")),
    ];
    visit.exchange.begin(200, &headers, Some(record.bytes)).await?;
    send(visit, &record).await?;
    Ok(visit.exchange.write(Bytes::new(), true).await?)
}

/// Sends the bytes of a file as a part of an answer that has begun; for one without a body, nothing is read.
pub(super) async fn send(visit: &mut Visit<'_>, record: &FileRecord) -> Result<(), End> {
    if visit.exchange.head.method == Method::HEAD {
        return Ok(());
    }
    let mut at = 0;
    while at < record.bytes {
        let piece = read(visit, &visit.tenant, record, at).await?;
        at += piece.len() as u64;
        visit.exchange.write(piece, false).await?;
    }
    Ok(())
}

async fn read(visit: &Visit<'_>, tenant: &Tenant, record: &FileRecord, at: u64) -> Result<Bytes, Failure> {
    let piece = visit.keeper.store.read(tenant, &record.id, at..at + READ_BYTES).await.map_err(failed)?;
    let gone = || Failure::internal("a file was deleted while it was sent");
    piece.filter(|piece| !piece.is_empty() || record.bytes == 0).ok_or_else(gone)
}

pub(super) async fn delete(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    // Files of another API's batches are theirs; one that is not complete is deleted all the same.
    let known = FileId::parse(id).ok_or_else(|| absent("File", id))?;
    let found = visit.keeper.store.file(&visit.tenant, &known).await.map_err(failed)?;
    if found.is_some_and(|file| file.purpose.starts_with('.')) {
        return Err(absent("File", id).into());
    }
    match visit.keeper.store.delete_file(&visit.tenant, &known).await.map_err(failed)? {
        Deleted::Yes => answer(visit.exchange, &json::DeletedObject { id, object: "file", deleted: true }).await,
        Deleted::Absent => Err(absent("File", id).into()),
        Deleted::InUse => {
            let message = "A batch that has not ended reads this file: cancel it, or wait for its end.";
            Err(Failure::new(ErrorKind::InvalidRequest, message).param("id").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(fields: &[(&str, &str)]) -> Result<Upload, ApiError> {
        let mut body = String::new();
        for (name, value) in fields {
            body += &format!(
                "--B\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"a.jsonl\"\r\n\r\n{value}\r\n"
            );
        }
        read_form(&Bytes::from(body + "--B--"), "B")
    }

    #[track_caller]
    fn refused(fields: &[(&str, &str)], param: &str) {
        let error = form(fields).err().unwrap_or_else(|| panic!("{fields:?} was taken"));
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }

    #[test]
    fn forms_say_what_a_file_is() {
        let seconds = ("expires_after[seconds]", "3600");
        let all = [("purpose", "batch"), ("file", "{}\n"), ("expires_after[anchor]", "created_at"), seconds];
        let upload = form(&all).expect("complete");
        assert_eq!((upload.purpose.as_str(), upload.name.as_str(), upload.expires), ("batch", "a.jsonl", Some(3600)));
        assert_eq!(upload.content, "{}\n");
        refused(&all[1..2], "purpose");
        refused(&all[..1], "file");
        refused(&[all[0], all[1], all[1]], "file");
        refused(&[("purpose", "batch_output"), all[1]], "purpose");
        refused(&[all[0], all[1], seconds], "expires_after");
        refused(&[all[0], all[1], all[2], ("expires_after[seconds]", "3599")], "expires_after");
    }
}
