//! A mock of the chat API, to which gateways forward: as many chunks as `max_tokens` asks for, one write each,
//! `metadata.gap_ms` apart.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::time::{Sleep, sleep};

const CHUNK: &str = "data: {\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\",\
\"choices\":[{\"index\":0,\"delta\":{\"content\":\"otter \"},\"finish_reason\":null}],\"usage\":null}\n\n";
const FINISH: &str = "data: {\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\",\
\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"length\"}],\"usage\":null}\n\ndata: [DONE]\n\n";
const WHOLE: &str = "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"mock\",\
\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"otter\"},\"finish_reason\":\"length\"}],\
\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"total_tokens\":10}}";

/// Serves until the process ends.
pub(crate) async fn serve(listen: SocketAddr, gap: Duration) -> anyhow::Result<()> {
    accept(TcpListener::bind(listen).await?, gap).await
}

/// Serves the connections of `listener`.
pub(crate) async fn accept(listener: TcpListener, gap: Duration) -> anyhow::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        // The task ends with its client.
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(request, gap));
            let _closed =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Body of an answer with `chunks` chunks: every gateway that forwards bytes unchanged returns exactly this.
pub(crate) fn body(stream: bool, chunks: u32) -> Vec<u8> {
    if stream { [CHUNK.repeat(chunks as usize), FINISH.into()].concat().into() } else { WHOLE.into() }
}

type Answer = Response<Either<Full<Bytes>, Chunks>>;

async fn answer(request: Request<Incoming>, gap: Duration) -> Result<Answer, hyper::Error> {
    let body = request.into_body().collect().await?.to_bytes();
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (kind, body) = if asked["stream"] == true {
        let left = asked["max_tokens"].as_u64().unwrap_or(16);
        let wish = asked["metadata"]["gap_ms"].as_str().and_then(|text| text.parse().ok());
        let gap = wish.map_or(gap, Duration::from_millis);
        ("text/event-stream", Either::Right(Chunks { left, finished: false, gap, wait: None }))
    } else {
        ("application/json", Either::Left(Full::new(Bytes::from_static(WHOLE.as_bytes()))))
    };
    let mut response = Response::new(body);
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    Ok(response)
}

/// A stream of equal chunks.
struct Chunks {
    left: u64,
    finished: bool,
    gap: Duration,
    wait: Option<Pin<Box<Sleep>>>,
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.finished {
            return Poll::Ready(None);
        }
        if !self.gap.is_zero() {
            let gap = self.gap;
            let wait = self.wait.get_or_insert_with(|| Box::pin(sleep(gap)));
            ready!(wait.as_mut().poll(context));
            self.wait = None;
        }
        self.finished = self.left == 0;
        self.left = self.left.saturating_sub(1);
        let text = if self.finished { FINISH } else { CHUNK };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(text.as_bytes())))))
    }
}
