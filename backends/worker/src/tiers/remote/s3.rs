//! S3 bucket, or that of an S3-compatible server, as a store. A block is one object,
//! `PREFIX/penstock-kv-1/IDENTITY/HH/HASH`; nothing is deleted here: a lifecycle rule of the bucket does that.

use super::http::Http;
use super::{ANSWER_TIMEOUT, Line, seal, unseal, value_bytes};
use crate::tiers::block::Identity;
use crate::tiers::io::{Failure, Store};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig,
};
use penstock_kv::SlotId;
use penstock_kv::tier::Link;
use penstock_proto::{BlockHash, Bucket};
use std::time::Duration;

/// Connections, and so blocks in flight at once: an object takes long to begin, and then comes fast.
const CONNECTIONS: usize = 8;
/// Version of the layout: objects of other versions are ignored.
const LAYOUT: &str = "penstock-kv-1";
/// Backoff before a retry: a connection that the server has closed meanwhile is replaced at once.
const BACKOFF: Duration = Duration::from_millis(1);

/// Stores at the bucket of `url`. `secret`: `ACCESS_KEY_ID:SECRET_ACCESS_KEY`, and `:SESSION_TOKEN` where there is
/// one; without it the environment's credentials (`AWS_ACCESS_KEY_ID` and others, web identity, the instance's role).
pub(super) fn stores(url: &str, secret: Option<&str>, identity: &Identity) -> Result<Vec<Box<dyn Store>>, String> {
    let bucket: Bucket = url.parse().map_err(|error: penstock_proto::BucketError| error.to_string())?;
    let http = Http::new(value_bytes(identity) + 1)?;
    let joined = format!("{}/{LAYOUT}/{}", bucket.prefix, identity.name());
    let prefix = joined.trim_start_matches('/');
    let one = |line| {
        // The library's message may repeat its input.
        let refused = |_| "the remote KV tier cannot be set up: bucket, region, endpoint or credentials".to_owned();
        let store = builder(&bucket, secret)?.with_http_connector(http.clone()).build().map_err(refused)?;
        Ok(Box::new(Objects { store, identity: identity.clone(), prefix: prefix.to_owned(), line }) as Box<dyn Store>)
    };
    Line::some(CONNECTIONS)?.into_iter().map(one).collect()
}

fn builder(bucket: &Bucket, secret: Option<&str>) -> Result<AmazonS3Builder, String> {
    let mut builder = match secret {
        // An explicit secret is not mixed with the environment.
        Some(secret) => {
            let mut words = secret.splitn(3, ':');
            let (Some(id), Some(key)) = (words.next(), words.next()) else {
                return Err("the secret of the remote KV tier is not ACCESS_KEY_ID:SECRET_ACCESS_KEY".into());
            };
            let builder = AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(key);
            words.next().into_iter().fold(builder, AmazonS3Builder::with_token)
        }
        None => AmazonS3Builder::from_env(),
    };
    let backoff = BackoffConfig { init_backoff: BACKOFF, max_backoff: BACKOFF, ..BackoffConfig::default() };
    builder = builder.with_bucket_name(&bucket.name).with_retry(RetryConfig {
        backoff,
        max_retries: 1,
        retry_timeout: ANSWER_TIMEOUT,
    });
    if let Some(region) = &bucket.region {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = &bucket.endpoint {
        // S3-compatible servers seldom have a host name per bucket.
        let options = ClientOptions::new().with_allow_http(endpoint.starts_with("http://"));
        builder = builder.with_endpoint(endpoint).with_virtual_hosted_style_request(false).with_client_options(options);
    }
    Ok(builder)
}

/// The bucket as one thread sees it. Holds a secret: no `Debug`.
struct Objects {
    store: AmazonS3,
    identity: Identity,
    prefix: String,
    line: Line,
}

impl Objects {
    fn path(&self, hash: BlockHash) -> Path {
        let name = format!("{:032x}", hash.0);
        // Prefixed by its first digits: a bucket spreads names with different beginnings.
        Path::from(format!("{}/{}/{name}", self.prefix, &name[..2]))
    }
}

fn failure(error: &Error) -> Failure {
    // The error's text could repeat the sent bytes.
    let kind = match error {
        Error::NotFound { .. } => return Failure::Gone,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => "denied",
        _ => "failed",
    };
    tracing::debug!(kind, "a request to the remote KV tier failed");
    Failure::Broken
}

impl Store for Objects {
    fn write(&mut self, _: SlotId, link: Link, bytes: &[u8]) -> Result<(), Failure> {
        let (path, object) = (self.path(link.hash), seal(&self.identity, link, bytes));
        // An object under this name is the same block, so it is kept.
        let put = async { self.store.put(&path, PutPayload::from(object)).await.map_err(|error| failure(&error)) };
        // A missing bucket is not a missing block.
        self.line.ask(put).map_err(|_| Failure::Broken).map(drop)
    }

    fn read(&mut self, _: SlotId, hash: BlockHash) -> Result<Vec<u8>, Failure> {
        let path = self.path(hash);
        // One byte more than a block reveals a longer object.
        let range = Some(GetRange::Bounded(0..value_bytes(&self.identity) as u64 + 1));
        let options = GetOptions { range, ..GetOptions::default() };
        let get = async {
            self.store
                .get_opts(&path, options)
                .await
                .map_err(|error| failure(&error))?
                .bytes()
                .await
                .map_err(|error| failure(&error))
        };
        unseal(&self.identity, hash, &self.line.ask(get)?)
    }

    /// Finds the number of leading blocks: checks the first, which mostly decides; then bisects, since a bucket has no
    /// query for many objects. A gap between found blocks shows when the blocks are read.
    fn find(&mut self, hashes: &[BlockHash]) -> usize {
        let is_there =
            async |at: usize| match self.store.head(&self.path(hashes[at])).await.map_err(|error| failure(&error)) {
                Ok(_) => Ok(true),
                Err(Failure::Gone) => Ok(false),
                Err(failure) => Err(failure),
            };
        let search = async {
            let (mut there, mut end) = (0, hashes.len());
            let mut at = 0;
            while there < end {
                if is_there(at).await? {
                    there = at + 1
                } else {
                    end = at
                }
                at = there + (end - there) / 2;
            }
            Ok(there)
        };
        self.line.ask(search).unwrap_or(0)
    }
}
