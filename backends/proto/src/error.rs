//! What went wrong, whose fault it is, and whether trying again can help.

/// Whose fault an error is; it decides the status class and which health counter moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The request cannot be served as it is.
    Client,
    /// The gateway is overloaded, draining or misconfigured.
    Gateway,
    /// A worker of our own pool failed.
    Worker,
    /// A provider failed.
    Provider,
}

/// Whether a retry can succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// Never: the same request fails the same way.
    No,
    /// Later, at the same upstream.
    Same,
    /// Now, at another upstream.
    Other,
}

/// Kinds of failure that cross a crate boundary. One file of the gateway turns them into status codes and dialect bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ErrorKind {
    /// A field is missing, of the wrong type, out of range or contradicts another.
    InvalidRequest = 1,
    /// The field is understood, but what it asks for is not built.
    Unsupported = 2,
    /// Prompt and requested tokens exceed the served context.
    ContextLength = 3,
    /// No model of that name.
    ModelNotFound = 4,
    /// No such path.
    NotFound = 5,
    /// The path exists, the method does not.
    MethodNotAllowed = 6,
    /// Credentials are missing or wrong.
    Unauthorized = 7,
    /// The principal may not do this.
    Forbidden = 8,
    /// Head, header, body or field larger than its limit.
    TooLarge = 9,
    /// The client sent too slowly, or read too slowly.
    ClientTimeout = 10,
    /// A limit of the operator's is reached; Retry-After says when.
    RateLimited = 11,
    /// The queue is full or admission predicts a missed objective.
    Overloaded = 12,
    /// No worker or provider is able to take the request now.
    Unavailable = 13,
    /// A worker died or failed and the stream could not go on elsewhere.
    WorkerFailed = 14,
    /// A deadline of the gateway's passed.
    DeadlineExceeded = 15,
    /// The gateway is shutting down.
    Draining = 16,
    /// A bug of ours.
    Internal = 17,
    /// The bytes on the connection are not valid HTTP.
    Malformed = 18,
    /// The body's media type or coding is not served.
    UnsupportedMedia = 19,
    /// A provider failed, or what it answered is no answer.
    ProviderFailed = 20,
    /// Somebody who may do so ended the request.
    Cancelled = 21,
    /// The model computes no token after this text: its logits are NaN or infinite there, and elsewhere they are not.
    ModelFailed = 22,
}

impl ErrorKind {
    /// Whose fault this kind is.
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

    /// The kind with that number on the wire; unknown numbers are a bug of the peer's and read as [`ErrorKind::Internal`].
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
