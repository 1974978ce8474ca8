//! The three shapes of a plugin: its kind, its entry in the config, its part in one request.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use penstock_types::ChatEvent;

use crate::context::{AnswerHead, EndFacts, RequestContext};
use crate::host::Host;
use crate::settings::Settings;
use crate::verdict::{Flow, PluginError, Rejection, Verdict};

/// Kind of plugin, which entries of the config name; builds the plugin of an entry.
pub trait Kind: Send + Sync {
    /// Name of the kind, as an entry of the config gives it.
    fn name(&self) -> &'static str;

    /// Builds a plugin from the settings of one entry. Every fault of the settings is reported to `settings`
    /// ([`Settings::fault`]), all at once; then `None` may be returned. The built plugin must not start anything: a
    /// config that is only checked is built too.
    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>>;
}

/// Part of the request that must have been read before `on_request`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Needs {
    /// Header fields and facts alone: no body is read for the plugin.
    #[default]
    Facts,
    /// Bytes of the body, in the client's dialect.
    Body,
    /// Decoded request. A body that breaks a rule of its dialect is then refused, though an upstream might have taken
    /// it.
    Request,
}

/// Part of an answer that a plugin sees. The smaller the part, the lower the cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sees {
    /// Nothing of the answer: it passes without a call of the plugin.
    #[default]
    Nothing,
    /// End of the answer alone, with its facts.
    End,
    /// Header fields of the answer, and its end.
    Head,
    /// Header fields, end and events. An upstream's bytes in the client's own dialect are decoded for that, and encoded
    /// again.
    Events,
    /// Header fields, end and bytes in the client's dialect: every event is [`ChatEvent::Raw`], of a whole answer
    /// exactly one.
    Bytes,
}

/// One entry of the config at work; shared by all requests.
#[async_trait]
pub trait Plugin: Send + Sync {
    /// Part of its requests that must have been read before `on_request`; the more, the higher the cost.
    fn needs(&self) -> Needs {
        Needs::Facts
    }

    /// Begins the plugin's part in one request. Cheap: nothing has been read.
    fn begin(&self) -> Box<dyn Hooks>;

    /// Digest of further inputs besides the settings, such as a file: with another number the plugin counts as another
    /// one at a reload.
    fn revision(&self) -> u64 {
        0
    }

    /// Interval at which [`Plugin::tick`] is called while the plugin is in use; `None`: never.
    fn tick_period(&self) -> Option<Duration> {
        None
    }

    /// Numbers that the plugin counts itself, for the metrics. There are few, and their names do not come from
    /// requests.
    fn values(&self) -> Vec<(String, f64)> {
        Vec::new()
    }

    /// Returns true if `on_request` can be tried ([`crate::RequestInfo::dry_run`]): besides the context it changes nothing but what
    /// goes through the host, which stops a plugin that calls out. False: a dry run leaves the plugin out.
    fn can_dry_run(&self) -> bool {
        false
    }

    /// Periodic work that belongs to no request.
    async fn tick(&self, _host: Arc<dyn Host>) {}
}

/// Part of a plugin in one request. Dropped when the request has ended, however it ended.
#[async_trait]
pub trait Hooks: Send {
    /// Sees the request before anything is decided about it. Dropping the future must be safe at every await: the host
    /// does that when the time is over or the client leaves.
    async fn on_request(&mut self, _request: &mut RequestContext) -> Result<Verdict, PluginError> {
        Ok(Verdict::Pass)
    }

    /// Part of the answer that the plugin wants; asked once, after `on_request`.
    fn sees(&self) -> Sees {
        Sees::Nothing
    }

    /// Sees the header fields of an answer that has begun, before any of its events. A rejection breaks the answer there:
    /// the client reads it as an error, or as an error event where the head of a slow stream had to go out before. Not
    /// called for errors.
    fn on_head(&mut self, _head: &mut AnswerHead) -> Result<Option<Rejection>, PluginError> {
        Ok(None)
    }

    /// Takes the next events; those left in `events` go on. Text may be held back, and must be released with the
    /// choice's `Finish`, or when `end` says that these were the last. After an error, `events` is taken to be
    /// unchanged.
    fn on_event(&mut self, _events: &mut Vec<ChatEvent>, _end: bool) -> Result<Flow, PluginError> {
        Ok(Flow::Go)
    }

    /// Releases the text that is held back, unchanged: this plugin has failed and the answer goes on without it.
    fn release(&mut self, _out: &mut Vec<ChatEvent>) {}

    /// Memory of what the plugin holds of the answer at this moment, in bytes: text and events held back ([`crate::event_bytes`]),
    /// and copies that it makes. The host asks after every batch, so the number is at hand, and charges it to the memory
    /// for answers of the request's key; an answer for which there is no more breaks.
    fn held_bytes(&self) -> usize {
        0
    }

    /// Learns of the request's end. Called exactly once for a request that `on_request` has seen, however it ended.
    fn on_end(&mut self, _facts: &EndFacts) {}
}
