//! Adapters of the model: low-rank additions (LoRA) to its products, each read from a PEFT folder before the worker serves.

use crate::config::WorkerError;
use penstock_engine::Engine;
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::Checkpoint;
use penstock_proto::ADAPTERS_MAX;
use penstock_proto::frames::{LoadedAdapter, OrderedAdapter};
use std::collections::BTreeSet;
use std::path::PathBuf;
use tracing::info;

/// Adapter to load: `NAME=PATH` on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSource {
    /// Name of the model that the adapter makes of the worker's model.
    pub name: String,
    /// PEFT folder, with `adapter_config.json` and `adapter_model.safetensors`.
    pub path: PathBuf,
}

impl std::str::FromStr for AdapterSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.into() })
            }
            _ => Err("an adapter is NAME=PATH, as sql=/models/sql-lora".to_owned()),
        }
    }
}

/// Adapter that a gateway orders at the start of its own worker: `KEY:NAME=PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderedSource(pub(crate) OrderedAdapter);

impl std::str::FromStr for OrderedSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':').and_then(|(key, rest)| Some((key, rest.split_once('=')?)));
        match parts {
            Some((key, (name, path))) if [key, name, path].iter().all(|part| !part.is_empty()) => {
                Ok(Self(OrderedAdapter { name: name.to_owned(), path: path.to_owned(), key: key.to_owned() }))
            }
            _ => Err("an ordered adapter is KEY:NAME=PATH".to_owned()),
        }
    }
}

/// Adapter that was read and fits the model, under its name.
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) adapter: Adapter,
}

/// Reads adapters and checks them against a model.
///
/// # Errors
/// [`WorkerError::Model`] with the adapter's name and the reason; too many adapters, or two of one name.
pub(crate) fn open(sources: &[AdapterSource], checkpoint: &Checkpoint) -> Result<Vec<Named>, WorkerError> {
    if sources.len() > ADAPTERS_MAX {
        let message = format!("{} adapters are given; a worker holds at most {ADAPTERS_MAX}", sources.len());
        return Err(WorkerError::Model(message));
    }
    let mut names = BTreeSet::new();
    let opened = sources.iter().map(|AdapterSource { name, path }| {
        if !names.insert(name) {
            return Err(WorkerError::Model(format!("adapter {name:?} is given twice")));
        }
        let adapter = Adapter::open(path, checkpoint.config());
        let adapter = adapter.map_err(|error| WorkerError::Model(format!("adapter {name:?}: {error}")))?;
        Ok(Named { name: name.clone(), adapter })
    });
    opened.collect()
}

/// Bytes that adapters take in memory.
pub(crate) fn bytes(adapters: &[Named]) -> u64 {
    adapters.iter().map(|named| named.adapter.bytes()).fold(0, u64::saturating_add)
}

/// Gives adapters to an engine; returns them as gateways are told. Two of equal content are held once.
///
/// # Errors
/// The device holds no adapters.
pub(crate) fn load(adapters: &[Named], engine: &mut Engine) -> Result<Vec<LoadedAdapter>, WorkerError> {
    let mut loaded = Vec::with_capacity(adapters.len());
    for Named { name, adapter } in adapters {
        let id = adapter.id();
        if !engine.adapters().contains(&id) {
            engine.add_adapter(adapter)?;
        }
        info!(name, ?id, rank = adapter.rank(), bytes = adapter.bytes(), "adapter loaded");
        loaded.push(LoadedAdapter { name: name.clone(), id: id.to_bytes().to_vec(), key: String::new() });
    }
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_name_and_a_path() {
        let source = |text: &str| text.parse::<AdapterSource>();
        let sql = AdapterSource { name: "org/sql".into(), path: "/models/a=b".into() };
        assert_eq!(source("org/sql=/models/a=b"), Ok(sql));
        for text in ["", "sql", "=/models/sql", "sql="] {
            assert!(source(text).is_err_and(|why| why.contains("NAME=PATH")), "{text}");
        }
    }

    #[test]
    fn an_ordered_source_has_a_key_too() {
        let sql = OrderedAdapter { name: "org/sql".into(), path: "/models/a:b=c".into(), key: "0f".into() };
        assert_eq!("0f:org/sql=/models/a:b=c".parse(), Ok(OrderedSource(sql)));
        for text in ["", "sql=/a", "0f:sql", ":sql=/a", "0f:=/a", "0f:sql="] {
            assert!(text.parse::<OrderedSource>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_loaded_is_named() {
        let checkpoint = crate::model::open(None).expect("opens").0;
        let refused = |sources: &[AdapterSource]| {
            let opened = open(sources, &checkpoint);
            opened.err().map(|error| error.to_string()).expect("refused")
        };
        let source = |name: &str| AdapterSource { name: name.into(), path: "/nonexistent/lora".into() };
        let message = refused(&[source("sql")]);
        assert!(message.contains("\"sql\"") && message.contains("/nonexistent/lora"), "{message}");
        let many: Vec<_> = (0..=ADAPTERS_MAX).map(|at| source(&at.to_string())).collect();
        assert!(refused(&many).contains("at most 64"));
    }
}
