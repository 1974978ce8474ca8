//! URLs of stored objects.

use http::Method;
use penstock_proto::ErrorKind;

use penstock_base::error::{Failure, Methods};

/// Route to a stored object. Ids are as the client wrote them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredRoute {
    /// `POST /v1/files`: upload of a file.
    UploadFile,
    /// `GET /v1/files`: list of the key's files.
    ListFiles,
    /// `GET /v1/files/{id}`: facts about one file.
    File(String),
    /// `GET /v1/files/{id}/content`: bytes of one file.
    FileContent(String),
    /// `DELETE /v1/files/{id}`: deletion of one file.
    DeleteFile(String),
    /// `POST /v1/batches`: creation of a batch from an input file.
    CreateBatch,
    /// `GET /v1/batches`: list of the key's batches.
    ListBatches,
    /// `GET /v1/batches/{id}`: status of one batch.
    Batch(String),
    /// `POST /v1/batches/{id}/cancel`: cancellation of one batch.
    CancelBatch(String),
    /// `GET /v1/responses/{id}`: one stored response.
    Response(String),
    /// `DELETE /v1/responses/{id}`: deletion of one stored response.
    DeleteResponse(String),
    /// `POST /v1/responses/{id}/cancel`: cancellation of one background response.
    CancelResponse(String),
    /// `GET /v1/responses/{id}/input_items`: input items of one stored response.
    InputItems(String),
}

/// Example of each route, for tests.
pub(crate) const EXAMPLES: [(Method, &str); 13] = [
    (Method::POST, "/v1/files"),
    (Method::GET, "/v1/files"),
    (Method::GET, "/v1/files/file-1"),
    (Method::GET, "/v1/files/file-1/content"),
    (Method::DELETE, "/v1/files/file-1"),
    (Method::POST, "/v1/batches"),
    (Method::GET, "/v1/batches"),
    (Method::GET, "/v1/batches/batch_1"),
    (Method::POST, "/v1/batches/batch_1/cancel"),
    (Method::GET, "/v1/responses/resp_1"),
    (Method::DELETE, "/v1/responses/resp_1"),
    (Method::POST, "/v1/responses/resp_1/cancel"),
    (Method::GET, "/v1/responses/resp_1/input_items"),
];

impl StoredRoute {
    /// Route of a path below `/v1/`, if it is one of these.
    pub fn parse(method: &Method, path: &str) -> Option<Result<Self, Failure>> {
        let parts: Vec<&str> = path.strip_prefix("/v1/")?.split('/').collect();
        if parts.iter().any(|part| part.is_empty()) {
            return None;
        }
        let own = |id: &&str| (*id).to_owned();
        // HEAD is answered as GET, without the body.
        let (get, post, delete) =
            (method == Method::GET || method == Method::HEAD, method == Method::POST, method == Method::DELETE);
        let (route, methods) = match parts.as_slice() {
            ["files"] if post => (Some(StoredRoute::UploadFile), Methods::GetPost),
            ["files"] => (get.then_some(StoredRoute::ListFiles), Methods::GetPost),
            ["files", id] if delete => (Some(StoredRoute::DeleteFile(own(id))), Methods::GetDelete),
            ["files", id] => (get.then(|| StoredRoute::File(own(id))), Methods::GetDelete),
            ["files", id, "content"] => (get.then(|| StoredRoute::FileContent(own(id))), Methods::Get),
            ["batches"] if post => (Some(StoredRoute::CreateBatch), Methods::GetPost),
            ["batches"] => (get.then_some(StoredRoute::ListBatches), Methods::GetPost),
            ["batches", id] => (get.then(|| StoredRoute::Batch(own(id))), Methods::Get),
            ["batches", id, "cancel"] => (post.then(|| StoredRoute::CancelBatch(own(id))), Methods::Post),
            // An operation of its own, which a model answers.
            ["responses", "input_tokens" | "compact"] => return None,
            ["responses", id] if delete => (Some(StoredRoute::DeleteResponse(own(id))), Methods::GetDelete),
            ["responses", id] => (get.then(|| StoredRoute::Response(own(id))), Methods::GetDelete),
            ["responses", id, "cancel"] => (post.then(|| StoredRoute::CancelResponse(own(id))), Methods::Post),
            ["responses", id, "input_items"] => (get.then(|| StoredRoute::InputItems(own(id))), Methods::Get),
            _ => return None,
        };
        Some(route.ok_or_else(|| {
            let message = format!("This URL takes {} requests only.", methods.header());
            Failure::new(ErrorKind::MethodNotAllowed, message).allow(methods)
        }))
    }

    /// Bounded name of the route for logs, metrics and scopes: ids are left out.
    pub fn label(&self) -> &'static str {
        match self {
            StoredRoute::UploadFile | StoredRoute::ListFiles => "/v1/files",
            StoredRoute::File(_) | StoredRoute::DeleteFile(_) => "/v1/files/{id}",
            StoredRoute::FileContent(_) => "/v1/files/{id}/content",
            StoredRoute::CreateBatch | StoredRoute::ListBatches => "/v1/batches",
            StoredRoute::Batch(_) => "/v1/batches/{id}",
            StoredRoute::CancelBatch(_) => "/v1/batches/{id}/cancel",
            StoredRoute::Response(_) | StoredRoute::DeleteResponse(_) => "/v1/responses/{id}",
            StoredRoute::CancelResponse(_) => "/v1/responses/{id}/cancel",
            StoredRoute::InputItems(_) => "/v1/responses/{id}/input_items",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn check(method: &str, path: &str, expected: Option<Result<StoredRoute, u16>>) {
        let method = Method::from_bytes(method.as_bytes()).expect("a token");
        let found = StoredRoute::parse(&method, path).map(|route| route.map_err(|failure| failure.status()));
        assert_eq!(found, expected, "{method} {path}");
    }

    #[test]
    fn every_route_has_an_example() {
        let mut seen = [0; EXAMPLES.len()];
        for (method, url) in EXAMPLES {
            let route = StoredRoute::parse(&method, url).expect(url).expect(url);
            seen[match route {
                StoredRoute::UploadFile => 0,
                StoredRoute::ListFiles => 1,
                StoredRoute::File(_) => 2,
                StoredRoute::FileContent(_) => 3,
                StoredRoute::DeleteFile(_) => 4,
                StoredRoute::CreateBatch => 5,
                StoredRoute::ListBatches => 6,
                StoredRoute::Batch(_) => 7,
                StoredRoute::CancelBatch(_) => 8,
                StoredRoute::Response(_) => 9,
                StoredRoute::DeleteResponse(_) => 10,
                StoredRoute::CancelResponse(_) => 11,
                StoredRoute::InputItems(_) => 12,
            }] += 1;
        }
        assert!(seen.iter().all(|count| *count == 1), "{seen:?}");
    }

    #[test]
    fn routes_have_their_methods() {
        let id = || "file-1".to_owned();
        check("POST", "/v1/files", Some(Ok(StoredRoute::UploadFile)));
        check("GET", "/v1/files", Some(Ok(StoredRoute::ListFiles)));
        check("HEAD", "/v1/files/file-1", Some(Ok(StoredRoute::File(id()))));
        check("DELETE", "/v1/files/file-1", Some(Ok(StoredRoute::DeleteFile(id()))));
        check("GET", "/v1/files/file-1/content", Some(Ok(StoredRoute::FileContent(id()))));
        check("DELETE", "/v1/files/file-1/content", Some(Err(405)));
        check("PUT", "/v1/files", Some(Err(405)));
        check("POST", "/v1/batches/b/cancel", Some(Ok(StoredRoute::CancelBatch("b".into()))));
        check("GET", "/v1/batches/b/cancel", Some(Err(405)));
        for path in ["/v1/files/", "/v1/files//content", "/v1/filesystem", "/v1/files/a/b", "/v2/files"] {
            check("GET", path, None);
        }
    }
}
