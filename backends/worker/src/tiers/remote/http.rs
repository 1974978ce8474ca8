//! HTTP client for S3: one connection at a time, kept between exchanges, and no answer larger than its limit.
//!
//! Redirects are not followed: they would send credentials elsewhere. Deadlines are set by the caller, except that of
//! connecting.

use super::CONNECT_TIMEOUT;
use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{HOST, HeaderValue};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpService,
};
use rustls::pki_types::ServerName;
use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Longest error answer that is read, in bytes.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// Factory of HTTP connections to the object store, with TLS settings and the limit of an answer's size.
#[derive(Clone)]
pub(super) struct Http {
    tls: TlsConnector,
    bytes_max: usize,
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").field("bytes_max", &self.bytes_max).finish_non_exhaustive()
    }
}

impl Http {
    /// Creates the client, with the system's certificate authorities. `object_bytes`: the largest object that is
    /// accepted.
    pub(super) fn new(object_bytes: usize) -> Result<Self, String> {
        let config = penstock_link::public_client().map_err(|error| format!("TLS of the remote KV tier: {error}"))?;
        Ok(Self { tls: Arc::new(config).into(), bytes_max: object_bytes.max(ERROR_BYTES_MAX) })
    }
}

impl HttpConnector for Http {
    fn connect(&self, options: &object_store::ClientOptions) -> object_store::Result<HttpClient> {
        let plain = options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(|value| value == "true");
        Ok(HttpClient::new(Caller { http: self.clone(), plain, kept: Mutex::new(None) }))
    }
}

/// Host, port and scheme of a connection, by which a kept connection is found again.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    host: String,
    port: u16,
    tls: bool,
}

#[derive(Debug)]
struct Caller {
    http: Http,
    /// True if the connection goes without TLS, as the URL says.
    plain: bool,
    kept: Mutex<Option<(Place, SendRequest<HttpRequestBody>)>>,
}

fn failed(kind: HttpErrorKind) -> impl FnOnce(Box<dyn Error + Send + Sync>) -> HttpError {
    move |error| HttpError::new_boxed(kind, error)
}

impl Caller {
    fn place(&self, uri: &Uri) -> Option<Place> {
        let tls = uri.scheme_str() == Some("https");
        let host = uri.host()?.trim_matches(['[', ']']).to_owned();
        let place = Place { host, port: uri.port_u16().unwrap_or(if tls { 443 } else { 80 }), tls };
        (tls || self.plain).then_some(place)
    }

    /// Takes the kept connection, if it has this destination and the server has not closed it.
    fn kept(&self, place: &Place) -> Option<SendRequest<HttpRequestBody>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        kept.filter(|(there, sender)| there == place && !sender.is_closed()).map(|(_, sender)| sender)
    }

    async fn open(&self, place: &Place) -> Result<SendRequest<HttpRequestBody>, Box<dyn Error + Send + Sync>> {
        let stream = TcpStream::connect((place.host.as_str(), place.port)).await?;
        stream.set_nodelay(true)?;
        if !place.tls {
            return Ok(begin(stream).await?);
        }
        let name = ServerName::try_from(place.host.clone())?;
        Ok(begin(self.http.tls.connect(name, stream).await?).await?)
    }
}

async fn begin<S>(stream: S) -> hyper::Result<SendRequest<HttpRequestBody>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    // The task ends by itself when the sender is dropped.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

/// Rewrites a request into origin form: the host in a header, path and query in the first line.
fn in_origin_form(mut request: HttpRequest) -> Result<HttpRequest, Box<dyn Error + Send + Sync>> {
    if !request.headers().contains_key(HOST) {
        let host = request.uri().authority().map_or("", |authority| authority.as_str());
        let host = HeaderValue::from_str(host)?;
        request.headers_mut().insert(HOST, host);
    }
    let (mut head, body) = request.into_parts();
    head.uri = head.uri.path_and_query().map_or("/", |path| path.as_str()).parse()?;
    Ok(Request::from_parts(head, body))
}

#[async_trait]
impl HttpService for Caller {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let place = self.place(request.uri()).ok_or("an address without TLS").map_err(Into::into);
        let place = place.map_err(failed(HttpErrorKind::Unknown))?;
        let request = in_origin_form(request).map_err(failed(HttpErrorKind::Unknown))?;
        let mut sender = match self.kept(&place) {
            Some(sender) => sender,
            None => {
                let opened = timeout(CONNECT_TIMEOUT, self.open(&place)).await;
                opened.unwrap_or_else(|late| Err(late.into())).map_err(failed(HttpErrorKind::Connect))?
            }
        };
        // Every request here may be sent twice.
        let gone = |error: hyper::Error| HttpError::new(HttpErrorKind::Request, error);
        sender.ready().await.map_err(gone)?;
        let (head, body) = sender.send_request(request).await.map_err(gone)?.into_parts();
        let body = Limited::new(body, self.http.bytes_max).collect().await;
        let body: Bytes = body.map_err(failed(HttpErrorKind::Decode))?.to_bytes();
        // Connections with unread answers are not reused.
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some((place, sender));
        Ok(HttpResponse::from_parts(head, body.into()))
    }
}
