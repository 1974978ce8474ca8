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
    /// `GET /v1/chat/completions`: list of the key's stored chat completions.
    ListCompletions,
    /// `GET /v1/chat/completions/{id}`: one stored chat completion.
    Completion(String),
    /// `POST /v1/chat/completions/{id}`: other metadata for one stored chat completion.
    UpdateCompletion(String),
    /// `DELETE /v1/chat/completions/{id}`: deletion of one stored chat completion.
    DeleteCompletion(String),
    /// `GET /v1/chat/completions/{id}/messages`: messages that one stored chat completion answered.
    CompletionMessages(String),
    /// `POST /v1/messages/batches`: a new batch of messages, in Anthropic's API as the five below.
    CreateMessageBatch,
    /// `GET /v1/messages/batches`: list of the key's batches of messages.
    ListMessageBatches,
    /// `GET /v1/messages/batches/{id}`: status of one batch of messages.
    MessageBatch(String),
    /// `POST /v1/messages/batches/{id}/cancel`: cancellation of one batch of messages.
    CancelMessageBatch(String),
    /// `DELETE /v1/messages/batches/{id}`: deletion of one batch of messages that has ended.
    DeleteMessageBatch(String),
    /// `GET /v1/messages/batches/{id}/results`: results of one batch of messages.
    MessageBatchResults(String),
    /// `POST /v1/conversations`: a new conversation.
    CreateConversation,
    /// `GET /v1/conversations/{id}`: one conversation, without its items.
    Conversation(String),
    /// `POST /v1/conversations/{id}`: other metadata for one conversation.
    UpdateConversation(String),
    /// `DELETE /v1/conversations/{id}`: deletion of one conversation with its items.
    DeleteConversation(String),
    /// `POST /v1/conversations/{id}/items`: more items for one conversation.
    AddItems(String),
    /// `GET /v1/conversations/{id}/items`: items of one conversation.
    ListItems(String),
    /// `GET /v1/conversations/{id}/items/{item_id}`: one item of a conversation.
    Item(String, String),
    /// `DELETE /v1/conversations/{id}/items/{item_id}`: deletion of one item of a conversation.
    DeleteItem(String, String),
}

/// Example of each route, for tests.
pub(crate) const EXAMPLES: [(Method, &str); 32] = [
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
    (Method::GET, "/v1/chat/completions"),
    (Method::GET, "/v1/chat/completions/chatcmpl-1"),
    (Method::POST, "/v1/chat/completions/chatcmpl-1"),
    (Method::DELETE, "/v1/chat/completions/chatcmpl-1"),
    (Method::GET, "/v1/chat/completions/chatcmpl-1/messages"),
    (Method::POST, "/v1/messages/batches"),
    (Method::GET, "/v1/messages/batches"),
    (Method::GET, "/v1/messages/batches/msgbatch_1"),
    (Method::POST, "/v1/messages/batches/msgbatch_1/cancel"),
    (Method::DELETE, "/v1/messages/batches/msgbatch_1"),
    (Method::GET, "/v1/messages/batches/msgbatch_1/results"),
    (Method::POST, "/v1/conversations"),
    (Method::GET, "/v1/conversations/conv_1"),
    (Method::POST, "/v1/conversations/conv_1"),
    (Method::DELETE, "/v1/conversations/conv_1"),
    (Method::POST, "/v1/conversations/conv_1/items"),
    (Method::GET, "/v1/conversations/conv_1/items"),
    (Method::GET, "/v1/conversations/conv_1/items/msg_1"),
    (Method::DELETE, "/v1/conversations/conv_1/items/msg_1"),
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
            ["messages", "batches"] if post => (Some(StoredRoute::CreateMessageBatch), Methods::GetPost),
            ["messages", "batches"] => (get.then_some(StoredRoute::ListMessageBatches), Methods::GetPost),
            ["messages", "batches", id] if delete => {
                (Some(StoredRoute::DeleteMessageBatch(own(id))), Methods::GetDelete)
            }
            ["messages", "batches", id] => (get.then(|| StoredRoute::MessageBatch(own(id))), Methods::GetDelete),
            ["messages", "batches", id, "cancel"] => {
                (post.then(|| StoredRoute::CancelMessageBatch(own(id))), Methods::Post)
            }
            ["messages", "batches", id, "results"] => {
                (get.then(|| StoredRoute::MessageBatchResults(own(id))), Methods::Get)
            }
            ["conversations"] => (post.then_some(StoredRoute::CreateConversation), Methods::Post),
            ["conversations", id] if post => (Some(StoredRoute::UpdateConversation(own(id))), Methods::GetPostDelete),
            ["conversations", id] if delete => (Some(StoredRoute::DeleteConversation(own(id))), Methods::GetPostDelete),
            ["conversations", id] => (get.then(|| StoredRoute::Conversation(own(id))), Methods::GetPostDelete),
            ["conversations", id, "items"] if post => (Some(StoredRoute::AddItems(own(id))), Methods::GetPost),
            ["conversations", id, "items"] => (get.then(|| StoredRoute::ListItems(own(id))), Methods::GetPost),
            ["conversations", id, "items", item] if delete => {
                (Some(StoredRoute::DeleteItem(own(id), own(item))), Methods::GetDelete)
            }
            ["conversations", id, "items", item] => {
                (get.then(|| StoredRoute::Item(own(id), own(item))), Methods::GetDelete)
            }
            // The operation itself, which a model answers.
            ["chat", "completions"] if post => return None,
            ["chat", "completions"] => (get.then_some(StoredRoute::ListCompletions), Methods::GetPost),
            ["chat", "completions", id] if post => {
                (Some(StoredRoute::UpdateCompletion(own(id))), Methods::GetPostDelete)
            }
            ["chat", "completions", id] if delete => {
                (Some(StoredRoute::DeleteCompletion(own(id))), Methods::GetPostDelete)
            }
            ["chat", "completions", id] => (get.then(|| StoredRoute::Completion(own(id))), Methods::GetPostDelete),
            ["chat", "completions", id, "messages"] => {
                (get.then(|| StoredRoute::CompletionMessages(own(id))), Methods::Get)
            }
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
            // The label of the operation itself is the model's alone: a key may ask and not list.
            StoredRoute::ListCompletions
            | StoredRoute::Completion(_)
            | StoredRoute::UpdateCompletion(_)
            | StoredRoute::DeleteCompletion(_) => "/v1/chat/completions/{id}",
            StoredRoute::CompletionMessages(_) => "/v1/chat/completions/{id}/messages",
            StoredRoute::CreateMessageBatch | StoredRoute::ListMessageBatches => "/v1/messages/batches",
            StoredRoute::MessageBatch(_) | StoredRoute::DeleteMessageBatch(_) => "/v1/messages/batches/{id}",
            StoredRoute::CancelMessageBatch(_) => "/v1/messages/batches/{id}/cancel",
            StoredRoute::MessageBatchResults(_) => "/v1/messages/batches/{id}/results",
            StoredRoute::CreateConversation => "/v1/conversations",
            StoredRoute::Conversation(_) | StoredRoute::UpdateConversation(_) | StoredRoute::DeleteConversation(_) => {
                "/v1/conversations/{id}"
            }
            StoredRoute::AddItems(_) | StoredRoute::ListItems(_) => "/v1/conversations/{id}/items",
            StoredRoute::Item(..) | StoredRoute::DeleteItem(..) => "/v1/conversations/{id}/items/{id}",
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
                StoredRoute::ListCompletions => 13,
                StoredRoute::Completion(_) => 14,
                StoredRoute::UpdateCompletion(_) => 15,
                StoredRoute::DeleteCompletion(_) => 16,
                StoredRoute::CompletionMessages(_) => 17,
                StoredRoute::CreateConversation => 18,
                StoredRoute::Conversation(_) => 19,
                StoredRoute::UpdateConversation(_) => 20,
                StoredRoute::DeleteConversation(_) => 21,
                StoredRoute::AddItems(_) => 22,
                StoredRoute::ListItems(_) => 23,
                StoredRoute::Item(..) => 24,
                StoredRoute::DeleteItem(..) => 25,
                StoredRoute::CreateMessageBatch => 26,
                StoredRoute::ListMessageBatches => 27,
                StoredRoute::MessageBatch(_) => 28,
                StoredRoute::CancelMessageBatch(_) => 29,
                StoredRoute::DeleteMessageBatch(_) => 30,
                StoredRoute::MessageBatchResults(_) => 31,
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
