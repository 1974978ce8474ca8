//! Bytes of files: several lanes, each with one range of one file at a time.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{HeaderMap, header};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::ask::{Answer, Asker, Failure, Patience};
use super::partial::{Partial, Tag, Wanted};
use super::{Progress, PullError};
use crate::name::ModelName;

/// Bytes that are written at once: what a pull that is killed has fetched in vain, per lane.
const WRITE_BYTES: usize = 256 << 10;
/// Slowest body: in each window this many bytes must come.
const RATE: (Duration, u64) = (Duration::from_secs(30), 16 << 10);
/// Longest entity tag that is kept, in bytes.
const TAG_BYTES_MAX: usize = 512;

/// Source of a model's files: an endpoint, the repository and its commit.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) asker: Arc<Asker>,
    pub(super) name: ModelName,
    pub(super) commit: String,
}

type Job = (Arc<Partial>, usize);

/// Fetches what is missing of the files with at most `connections` requests at once, in the order given.
pub(super) async fn all(
    source: &Source,
    files: &[Arc<Partial>],
    connections: usize,
    progress: &Arc<Progress>,
) -> Result<(), PullError> {
    let jobs = files.iter().flat_map(|file| (0..file.pieces()).map(move |piece| (file.clone(), piece)));
    let jobs: VecDeque<Job> = jobs.filter(|(file, piece)| file.wanted(*piece).is_some()).collect();
    let lanes = connections.max(1).min(jobs.len());
    let jobs = Arc::new(Mutex::new(jobs));
    let mut running = JoinSet::new();
    for _ in 0..lanes {
        let (source, jobs, progress) = (source.clone(), jobs.clone(), progress.clone());
        running.spawn(async move {
            let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            while let Some((file, index)) = next() {
                piece(&source, &file, index, &progress).await?;
            }
            Ok::<_, PullError>(())
        });
    }
    while let Some(ended) = running.join_next().await {
        // The first error ends the others: dropping the set aborts them.
        ended.map_err(|_| PullError::Interrupted)??;
    }
    for file in files.iter().filter(|file| file.left() > 0) {
        from_start(source, file, progress).await?;
    }
    Ok(())
}

/// Fetches the rest of one piece.
async fn piece(source: &Source, file: &Partial, index: usize, progress: &Progress) -> Result<(), PullError> {
    let mut patience = Patience::default();
    loop {
        let Some(wanted) = file.wanted(index).filter(|_| !file.is_to_begin_anew()) else { return Ok(()) };
        let Err(failure) = range(source, file, index, wanted, progress).await else { continue };
        if file.wanted(index).is_none_or(|now| now.start > wanted.start) {
            patience.reset();
        }
        patience.wait(failure, progress).await?;
    }
}

/// Asks once for a range and writes what comes.
async fn range(
    source: &Source,
    file: &Partial,
    index: usize,
    wanted: Wanted,
    progress: &Progress,
) -> Result<(), Failure> {
    let Wanted { start, end } = wanted;
    let is_whole = start == 0 && end == file.size();
    let asked = (!is_whole).then_some((start, end - 1));
    let tag = file.tag();
    let answer = source.asker.file((&source.name, &source.commit, file.path()), asked, tag.as_ref()).await?;
    let new = strong_tag(&answer);
    let is_same = match (&tag, &new) {
        (Some(tag), Some(new)) => tag.origin != new.origin || tag.value == new.value,
        _ => true,
    };
    match answer.response.status {
        200 if is_whole => check_length(&answer, end)?,
        206 if !is_whole
            && is_same
            && content_range(&answer.response.headers) == Some((start, end - 1, file.size())) => {}
        206 if is_same => {
            return Err(Failure::broken(&answer.url, "the answer is another range than the one that was asked for"));
        }
        // No ranges there, or other bytes than before: from the start, in one request.
        _ => {
            file.begin_anew();
            return Ok(());
        }
    }
    if let Some(new) = new {
        file.set_tag(new)?;
    }
    receive(answer, end - start, &mut |bytes| {
        progress.add(bytes.len() as u64);
        file.write(index, bytes)
    })
    .await
}

/// Fetches a whole file in one request, from a server that does not send ranges of it.
async fn from_start(source: &Source, file: &Partial, progress: &Progress) -> Result<(), PullError> {
    let mut patience = Patience::default();
    while file.left() > 0 {
        progress.take_back(file.forget()?);
        if let Err(failure) = stream(source, file, progress).await {
            patience.wait(failure, progress).await?;
        }
    }
    Ok(())
}

async fn stream(source: &Source, file: &Partial, progress: &Progress) -> Result<(), Failure> {
    let answer = source.asker.file((&source.name, &source.commit, file.path()), None, None).await?;
    if answer.response.status != 200 {
        let reason = format!("status {} to a request for the whole file", answer.response.status);
        return Err(Failure::broken(&answer.url, &reason));
    }
    check_length(&answer, file.size())?;
    receive(answer, file.size(), &mut |mut bytes| {
        progress.add(bytes.len() as u64);
        while !bytes.is_empty() {
            let first = (0..file.pieces()).find_map(|piece| Some((piece, file.wanted(piece)?)));
            let Some((piece, wanted)) = first else { return Ok(()) };
            let (now, rest) = bytes.split_at(bytes.len().min((wanted.end - wanted.start) as usize));
            file.write(piece, now)?;
            bytes = rest;
        }
        Ok(())
    })
    .await
}

/// Reads a body of exactly `length` bytes; what came before a failure is written.
async fn receive(
    mut answer: Answer,
    length: u64,
    write: &mut (dyn FnMut(&[u8]) -> Result<(), PullError> + Send),
) -> Result<(), Failure> {
    let (mut buffer, mut left) = (Vec::with_capacity(WRITE_BYTES * 2), length);
    let (mut window, mut in_window) = (Instant::now(), 0);
    loop {
        let before = buffer.len();
        let more = poll_fn(|context| answer.response.body.poll_chunk(context, &mut buffer)).await;
        in_window += (buffer.len() - before) as u64;
        if buffer.len() as u64 > left {
            return Err(Failure::broken(&answer.url, "the answer has more bytes than were asked for"));
        }
        let is_over = !matches!(more, Ok(true)) || buffer.len() as u64 == left;
        if is_over || buffer.len() >= WRITE_BYTES {
            write(&buffer)?;
            left -= buffer.len() as u64;
            buffer.clear();
        }
        match more {
            Ok(true) => {}
            // The connection is used again where the body's end was seen.
            Ok(false) if left == 0 => return Ok(()),
            Ok(false) => return Err(Failure::broken(&answer.url, "the answer ended early")),
            Err(_) if left == 0 => return Ok(()),
            Err(error) => return Err(Failure::broken(&answer.url, &error)),
        }
        if window.elapsed() >= RATE.0 {
            if in_window < RATE.1 && left > 0 {
                return Err(Failure::broken(&answer.url, "the answer comes too slowly"));
            }
            (window, in_window) = (Instant::now(), 0);
        }
    }
}

fn check_length(answer: &Answer, size: u64) -> Result<(), Failure> {
    let length =
        answer.response.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match length {
        Some(length) if length != size => {
            let reason = format!("the answer has {length} bytes, and the hub's list says {size}");
            Err(Failure::broken(&answer.url, &reason))
        }
        _ => Ok(()),
    }
}

/// First and last byte and size of `Content-Range: bytes FIRST-LAST/SIZE`.
fn content_range(headers: &HeaderMap) -> Option<(u64, u64, u64)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?, size.parse().ok()?))
}

/// Strong entity tag of an answer: a weak one does not say that bytes are the same.
fn strong_tag(answer: &Answer) -> Option<Tag> {
    let value = answer.response.headers.get(header::ETAG)?.to_str().ok()?;
    let is_strong = value.len() >= 2 && value.len() <= TAG_BYTES_MAX && value.starts_with('"') && value.ends_with('"');
    is_strong.then(|| Tag { origin: answer.origin.clone(), value: value.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn ranges_of_answers_are_read() {
        let of = |text: &'static str| {
            content_range(&HeaderMap::from_iter([(header::CONTENT_RANGE, HeaderValue::from_static(text))]))
        };
        assert_eq!(of("bytes 5-9/10"), Some((5, 9, 10)));
        for text in ["bytes */10", "bytes 5-9/*", "bytes 5-/10", "items 5-9/10", "5-9/10", "bytes -1-9/10"] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
