//! Location of an S3 bucket: `s3://BUCKET/PREFIX?endpoint=URL&region=REGION`. Credentials have no place in it.

use std::str::FromStr;

/// Location of a bucket and of the objects in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    /// Name of the bucket.
    pub name: String,
    /// Prefix of all object names, without slashes at its ends; may be empty.
    pub prefix: String,
    /// URL of an S3-compatible server, `http://` or `https://`; `None` means Amazon's in the region.
    pub endpoint: Option<String>,
    /// Region; `None` means that of the environment, or the server's default.
    pub region: Option<String>,
}

/// Reason why a text is not a bucket. Does not repeat the text, which could hold a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BucketError {
    /// The scheme is not `s3`, or the name is missing.
    #[error("is not s3://BUCKET/PREFIX?endpoint=URL&region=REGION")]
    Form,
    /// The bucket or prefix has a character outside letters, digits and `-._/`, which could be read as another part of
    /// a URL.
    #[error("has letters in the name of the bucket or in the prefix that are not a-z, A-Z, 0-9, -, ., _")]
    Name,
    /// The path has a part that intermediaries may drop from a URL, so that the objects would lie elsewhere.
    #[error("has a bucket or a part of the prefix that is empty, . or ..")]
    Part,
    /// The endpoint has another scheme than http and https, or more than scheme, host and port.
    #[error("has an endpoint that is not http://HOST:PORT or https://HOST:PORT")]
    Endpoint,
    /// The region is empty or not a name.
    #[error("has a region that is not a name")]
    Region,
    /// The query has another parameter than endpoint and region.
    #[error("takes endpoint and region behind the question mark, and nothing else")]
    Query,
}

fn is_plain(text: &str) -> bool {
    text.chars().all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter))
}

fn is_endpoint(url: &str) -> bool {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    rest.is_some_and(|host| {
        !host.is_empty() && host.chars().all(|letter| letter.is_ascii_alphanumeric() || "-._:[]".contains(letter))
    })
}

impl FromStr for Bucket {
    type Err = BucketError;

    fn from_str(url: &str) -> Result<Self, BucketError> {
        let rest = url.strip_prefix("s3://").ok_or(BucketError::Form)?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (name, prefix) = path.split_once('/').unwrap_or((path, ""));
        let prefix = prefix.trim_matches('/');
        if name.is_empty() {
            return Err(BucketError::Form);
        }
        if !is_plain(name) || !prefix.split('/').all(is_plain) {
            return Err(BucketError::Name);
        }
        let is_part = |part: &str| !["", ".", ".."].contains(&part);
        if !is_part(name) || !(prefix.is_empty() || prefix.split('/').all(is_part)) {
            return Err(BucketError::Part);
        }
        let mut bucket = Self { name: name.to_owned(), prefix: prefix.to_owned(), ..Self::default() };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=').map(|(key, value)| (key, value.trim_end_matches('/'))) {
                Some(("endpoint", value)) if is_endpoint(value) => bucket.endpoint = Some(value.to_owned()),
                Some(("endpoint", _)) => return Err(BucketError::Endpoint),
                Some(("region", value)) if !value.is_empty() && is_plain(value) => {
                    bucket.region = Some(value.to_owned());
                }
                Some(("region", _)) => return Err(BucketError::Region),
                _ => return Err(BucketError::Query),
            }
        }
        Ok(bucket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_bucket_prefix_and_server() {
        let full = "s3://blocks/team/a/?endpoint=http://127.0.0.1:9000/&region=eu-1".parse();
        let expected = Bucket {
            name: "blocks".into(),
            prefix: "team/a".into(),
            endpoint: Some("http://127.0.0.1:9000".into()),
            region: Some("eu-1".into()),
        };
        assert_eq!(full, Ok(expected));
        assert_eq!("s3://blocks".parse(), Ok(Bucket { name: "blocks".into(), ..Bucket::default() }));
        assert!("s3://b?endpoint=https://[::1]:9000".parse::<Bucket>().is_ok());
        assert!("s3://b/..a/.b/c../...".parse::<Bucket>().is_ok(), "dots are letters of names");
    }

    #[test]
    fn what_is_none_is_refused_without_repeating_it() {
        for (wrong, why) in [
            ("redis://secret", BucketError::Form),
            ("s3://", BucketError::Form),
            ("s3:///secret", BucketError::Form),
            ("s3://id:secret@blocks", BucketError::Name),
            ("s3://blocks/a b", BucketError::Name),
            ("s3://blocks/../secret", BucketError::Part),
            ("s3://blocks/secret/./a", BucketError::Part),
            ("s3://blocks/secret/..", BucketError::Part),
            ("s3://blocks/secret//a", BucketError::Part),
            ("s3://../secret", BucketError::Part),
            ("s3://blocks?endpoint=ftp://secret", BucketError::Endpoint),
            ("s3://blocks?endpoint=http://id:secret@host", BucketError::Endpoint),
            ("s3://blocks?endpoint=http://host/path", BucketError::Endpoint),
            ("s3://blocks?region=", BucketError::Region),
            ("s3://blocks?key=secret", BucketError::Query),
        ] {
            assert_eq!(wrong.parse::<Bucket>(), Err(why), "{wrong}");
            assert!(!why.to_string().contains("secret"));
        }
    }
}
