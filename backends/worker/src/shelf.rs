//! Shelf of a worker's adapters, which its gateway orders while it runs.
//!
//! An order lists all adapters that the worker should hold. Missing ones are read and checked on another thread, one after the other, then loaded
//! between the engine's steps, a layer at a time. An adapter that is no longer listed gets no new requests, and is freed when its last request has ended.
//! An adapter that cannot be loaded is reported with its reason; the others, and the model, are served as before.
//!
//! No order is trusted with more than a name and a path: the folder is checked as at the start, and its bytes are held against the memory plan.

#[cfg(test)]
mod tests;

use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::ModelConfig;
use penstock_engine::{AdapterLoad, Engine};
use penstock_proto::frames::{AdapterOrder, AdapterReport, LoadedAdapter, OrderedAdapter, PendingAdapter};
use penstock_proto::{ADAPTERS_MAX, AdapterId};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tracing::{info, warn};

/// Longest reason that is reported, in bytes.
const WHY_BYTES_MAX: usize = 1024;

/// Result of reading an adapter's folder.
pub(crate) type Opened = Result<Adapter, String>;

/// Function that reads a folder on another thread and sends the result back to the shelf.
pub(crate) type Read = Box<dyn Fn(OrderedAdapter, Arc<ModelConfig>) + Send>;

/// Reads the folder of an ordered adapter and checks it against the model.
pub(crate) fn open(wanted: &OrderedAdapter, config: &ModelConfig) -> Opened {
    let path = Path::new(&wanted.path);
    if !path.is_absolute() {
        return Err(format!("{}: the adapter's folder must be an absolute path", wanted.path));
    }
    Adapter::open(path, config).map_err(|error| error.to_string())
}

/// Adapters of an engine that takes orders; see the module header.
pub struct Shelf {
    config: Arc<ModelConfig>,
    room: Room,
    entries: Vec<Entry>,
    /// True while another thread reads a folder.
    is_reading: bool,
    /// Load that goes on between steps.
    load: Option<(OrderedAdapter, Adapter, AdapterLoad)>,
}

/// Memory that adapters may take, and that they take.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    /// Bytes that the memory plan leaves for adapters.
    pub(crate) bytes: u64,
    /// Rows of the largest step, each of which holds the products with the first matrices.
    pub(crate) rows: u64,
    /// Bytes of the matrices, and values of a row's products, of each adapter that the engine holds.
    held: BTreeMap<AdapterId, (u64, u64)>,
}

impl Room {
    /// Room of `bytes` for an engine with steps of at most `rows` rows.
    pub(crate) fn new(bytes: u64, rows: usize) -> Self {
        Self { bytes, rows: rows as u64, held: BTreeMap::new() }
    }

    fn take(&mut self, adapter: &Adapter) {
        self.held.insert(adapter.id(), (adapter.bytes(), adapter.low_values() as u64));
    }

    /// Checks that there is memory for a further adapter, by the sizes that are known before it is loaded.
    fn check(&self, adapter: &Adapter) -> Result<(), String> {
        let own = (adapter.bytes(), adapter.low_values() as u64);
        let all = || self.held.iter().filter(|(id, _)| **id != adapter.id()).map(|(_, sizes)| *sizes).chain([own]);
        let matrices: u64 = all().map(|(bytes, _)| bytes).fold(0, u64::saturating_add);
        let products = 4 * self.rows * all().map(|(_, values)| values).max().unwrap_or(0);
        let needed = matrices.saturating_add(products);
        if needed <= self.bytes {
            return Ok(());
        }
        Err(format!(
            "not enough memory for the adapter: it takes {} bytes, all adapters with it would take {needed} bytes, and the worker's memory plan leaves {} bytes for adapters",
            own.0, self.bytes
        ))
    }
}

struct Entry {
    wanted: OrderedAdapter,
    state: State,
}

enum State {
    /// The adapter waits for its turn to be read.
    Waiting,
    /// The adapter is being read or loaded.
    Coming,
    Loaded(AdapterId),
    Failed(String),
    /// The adapter does not fit until leaving adapters are freed; with the reason.
    Crowded(String),
}

impl Shelf {
    /// Shelf with the adapters that the worker was started with, which the engine gets here.
    pub(crate) fn start(
        config: Arc<ModelConfig>,
        room: Room,
        started: Vec<(OrderedAdapter, Opened)>,
        engine: &mut Engine,
    ) -> Self {
        let mut shelf = Self { config, room, entries: Vec::new(), is_reading: false, load: None };
        for (wanted, opened) in started {
            let loaded = opened.and_then(|adapter| {
                shelf.room.check(&adapter)?;
                engine.add_adapter(&adapter).map_err(|error| error.to_string())?;
                shelf.room.take(&adapter);
                tell_loaded(&wanted, &adapter);
                Ok(adapter.id())
            });
            let state = loaded.map_or_else(|why| failed(&wanted, why), State::Loaded);
            shelf.entries.push(Entry { wanted, state });
        }
        shelf
    }

    /// Applies an order. Adapters of the order that are loaded or being loaded stay; failed ones are tried again.
    pub(crate) fn order(&mut self, order: AdapterOrder, engine: &mut Engine) {
        let mut wanted = order.adapters;
        if wanted.len() > ADAPTERS_MAX {
            warn!(
                adapters = wanted.len(),
                limit = ADAPTERS_MAX,
                "adapter order exceeds the limit: the adapters at the end of the list are ignored"
            );
            wanted.truncate(ADAPTERS_MAX);
        }
        let mut before = std::mem::take(&mut self.entries);
        let mut given_up = Vec::new();
        for wanted in wanted {
            if self.entries.iter().any(|entry| entry.wanted == wanted) {
                continue;
            }
            let known = before.iter().position(|entry| entry.wanted == wanted).map(|at| before.swap_remove(at).state);
            let state = match known {
                Some(state @ (State::Loaded(_) | State::Coming)) => state,
                _ => State::Waiting,
            };
            self.entries.push(Entry { wanted, state });
        }
        for Entry { wanted, state } in before {
            if let Some((_, adapter, mut load)) = self.load.take_if(|(loading, ..)| *loading == wanted) {
                engine.abandon(&mut load);
                given_up.push((wanted, adapter.id()));
            } else if let State::Loaded(id) = state {
                given_up.push((wanted, id));
            }
        }
        for (OrderedAdapter { name, .. }, id) in given_up {
            // Another name may stand for the same content.
            if !self.has(id) && engine.adapters().contains(&id) {
                engine.remove_adapter(id);
                info!(
                    name,
                    ?id,
                    "adapter removed: it gets no new requests, and is unloaded when its last request has ended"
                );
            }
        }
        self.room.held.retain(|id, _| engine.holds_adapter(*id));
    }

    /// Returns true if the content of that id is loaded for an entry, or being loaded.
    fn has(&self, id: AdapterId) -> bool {
        self.load.as_ref().is_some_and(|(_, adapter, _)| adapter.id() == id)
            || self.entries.iter().any(|entry| matches!(entry.state, State::Loaded(other) if other == id))
    }

    /// Returns true if [`Shelf::go_on`] has something to do now.
    pub(crate) fn is_loading(&self) -> bool {
        self.load.is_some()
    }

    /// Does the next part of the work, between two steps; true if the report has changed.
    pub(crate) fn go_on(&mut self, engine: &mut Engine, read: &Read) -> bool {
        if engine.free_adapters() > 0 {
            self.room.held.retain(|id, _| engine.holds_adapter(*id));
            info!(held = self.room.held.len(), "adapters unloaded");
            for entry in self.entries.iter_mut().filter(|entry| matches!(entry.state, State::Crowded(_))) {
                entry.state = State::Waiting;
            }
        }
        let changed = self.load_layer(engine);
        if !self.is_reading
            && self.load.is_none()
            && let Some(entry) = self.entries.iter_mut().find(|entry| matches!(entry.state, State::Waiting))
        {
            entry.state = State::Coming;
            self.is_reading = true;
            read(entry.wanted.clone(), Arc::clone(&self.config));
        }
        changed
    }

    fn load_layer(&mut self, engine: &mut Engine) -> bool {
        let Some((wanted, adapter, mut load)) = self.load.take() else { return false };
        let state = match engine.load_layer(&mut load, &adapter) {
            Ok(false) => {
                self.load = Some((wanted, adapter, load));
                return false;
            }
            Ok(true) => {
                tell_loaded(&wanted, &adapter);
                State::Loaded(adapter.id())
            }
            Err(error) => {
                self.room.held.retain(|id, _| engine.holds_adapter(*id));
                failed(&wanted, error.to_string())
            }
        };
        self.set(&wanted, state);
        true
    }

    fn set(&mut self, wanted: &OrderedAdapter, state: State) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.wanted == *wanted) {
            entry.state = state;
        }
    }

    /// Takes in what was read; true if the report has changed.
    pub(crate) fn opened(&mut self, wanted: OrderedAdapter, opened: Opened, engine: &mut Engine) -> bool {
        self.is_reading = false;
        if !self.entries.iter().any(|entry| entry.wanted == wanted && matches!(entry.state, State::Coming)) {
            // An order has taken it off the list meanwhile.
            return false;
        }
        let begun = opened.map_err(|why| failed(&wanted, why)).and_then(|adapter| {
            let room = self.room.check(&adapter);
            let begun = room.and_then(|()| engine.begin_adapter(adapter.id()).map_err(|error| error.to_string()));
            begun.map(|load| (adapter, load)).map_err(|why| {
                // A slot, or memory, comes back when requests with a removed adapter have ended.
                match self.room.held.keys().any(|id| !self.has(*id)) {
                    true => State::Crowded(why),
                    false => failed(&wanted, why),
                }
            })
        });
        match begun {
            Ok((adapter, load)) => {
                self.room.take(&adapter);
                self.load = Some((wanted, adapter, load));
                false
            }
            Err(state) => {
                self.set(&wanted, state);
                true
            }
        }
    }

    /// Adapters as gateways are told of them.
    pub(crate) fn report(&self) -> AdapterReport {
        let mut report = AdapterReport::default();
        for Entry { wanted, state } in &self.entries {
            let (name, key) = (wanted.name.clone(), wanted.key.clone());
            let why = match state {
                State::Loaded(id) => {
                    report.loaded.push(LoadedAdapter { name, id: id.to_bytes().to_vec(), key });
                    continue;
                }
                State::Waiting | State::Coming => String::new(),
                State::Crowded(why) => cut(format!(
                    "{why}; the worker tries again once requests that still use a removed adapter have ended"
                )),
                State::Failed(why) => why.clone(),
            };
            report.pending.push(PendingAdapter { name, key, why });
        }
        report
    }
}

fn tell_loaded(wanted: &OrderedAdapter, adapter: &Adapter) {
    let (name, id) = (&wanted.name, adapter.id());
    info!(name, ?id, rank = adapter.rank(), bytes = adapter.bytes(), "adapter loaded");
}

fn failed(wanted: &OrderedAdapter, why: String) -> State {
    warn!(name = wanted.name, path = wanted.path, why, "adapter cannot be loaded: the worker serves without it");
    State::Failed(cut(why))
}

fn cut(mut why: String) -> String {
    why.truncate(why.floor_char_boundary(WHY_BYTES_MAX));
    why
}
