//! Kinds of failure: the party at fault, and whether a retry can help.

/// Party at fault for an error; decides the status class and the health counter that moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The request cannot be served as it is; the client has to change it.
    Client,
    /// The gateway is overloaded, draining or misconfigured.
    Gateway,
    /// A worker of the gateway's own pool failed.
    Worker,
    /// An external provider failed: connection, timeout, rate limit or answer.
    Provider,
}

/// Whether a retry can succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// A retry never succeeds: the same request fails the same way.
    No,
    /// A retry can succeed later, at the same upstream.
    Same,
    /// A retry can succeed now, at another upstream.
    Other,
}

/// Kinds of failure that cross a crate boundary. One file of the gateway turns them into status codes and dialect bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ErrorKind {
    /// A field is missing, of the wrong type, out of range or contradicts another.
    InvalidRequest = 1,
    /// The field is known, but its value or effect is not supported.
    Unsupported = 2,
    /// Prompt and requested tokens exceed the served context.
    ContextLength = 3,
    /// The request names a model that the gateway does not serve.
    ModelNotFound = 4,
    /// No endpoint at the request's path.
    NotFound = 5,
    /// The path exists, the method does not.
    MethodNotAllowed = 6,
    /// Credentials of the request are missing or wrong.
    Unauthorized = 7,
    /// The principal of the request's key lacks the permission.
    Forbidden = 8,
    /// Head, header, body or field larger than its limit.
    TooLarge = 9,
    /// The client sent too slowly, or read too slowly.
    ClientTimeout = 10,
    /// A limit set by the operator is reached; Retry-After says for how long.
    RateLimited = 11,
    /// The queue is full or admission predicts a missed objective.
    Overloaded = 12,
    /// No worker or provider is able to take the request now.
    Unavailable = 13,
    /// A worker died or failed and the stream could not go on elsewhere.
    WorkerFailed = 14,
    /// A deadline set by the gateway passed before the answer was complete.
    DeadlineExceeded = 15,
    /// The gateway is shutting down and takes no new requests.
    Draining = 16,
    /// A bug in the gateway or the worker.
    Internal = 17,
    /// The bytes on the connection are not valid HTTP.
    Malformed = 18,
    /// The body's media type or coding is not served.
    UnsupportedMedia = 19,
    /// A provider failed, or its answer is invalid.
    ProviderFailed = 20,
    /// A party with the right to do so ended the request.
    Cancelled = 21,
    /// The model cannot compute a token after this text: its logits are NaN or infinite there, and elsewhere they are
    /// not.
    ModelFailed = 22,
}

impl ErrorKind {
    /// Party at fault for errors of this kind.
    pub fn fault(self) -> Fault {
        use ErrorKind::*;
        match self {
            InvalidRequest | Unsupported | ContextLength | ModelNotFound | NotFound | MethodNotAllowed
            | Unauthorized | Forbidden | TooLarge | ClientTimeout | RateLimited | Malformed | UnsupportedMedia => {
                Fault::Client
            }
            Overloaded | Unavailable | DeadlineExceeded | Draining | Internal | Cancelled => Fault::Gateway,
            WorkerFailed | ModelFailed => Fault::Worker,
            ProviderFailed => Fault::Provider,
        }
    }

    /// Whether the same request can succeed when tried again.
    pub fn retry(self) -> Retry {
        use ErrorKind::*;
        match self {
            RateLimited | Overloaded | Unavailable | Draining | ClientTimeout => Retry::Same,
            WorkerFailed | ProviderFailed | DeadlineExceeded => Retry::Other,
            _ => Retry::No,
        }
    }

    /// Kind with the given number on the wire; an unknown number is a bug of the peer and reads as
    /// [`ErrorKind::Internal`].
    pub fn from_wire(number: i32) -> Self {
        use ErrorKind::*;
        const ALL: [ErrorKind; 22] = [
            InvalidRequest,
            Unsupported,
            ContextLength,
            ModelNotFound,
            NotFound,
            MethodNotAllowed,
            Unauthorized,
            Forbidden,
            TooLarge,
            ClientTimeout,
            RateLimited,
            Overloaded,
            Unavailable,
            WorkerFailed,
            DeadlineExceeded,
            Draining,
            Internal,
            Malformed,
            UnsupportedMedia,
            ProviderFailed,
            Cancelled,
            ModelFailed,
        ];
        ALL.into_iter().find(|kind| *kind as i32 == number).unwrap_or(Internal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_numbers_come_back() {
        for number in 1..=21 {
            assert_eq!(ErrorKind::from_wire(number) as i32, number);
        }
        assert_eq!(ErrorKind::from_wire(999), ErrorKind::Internal);
    }
}
