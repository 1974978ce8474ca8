//! The three shapes of a plugin: what it is, what the config made of it, what it is for one request.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use penstock_dialects::ChatEvent;

use crate::context::{AnswerHead, EndFacts, RequestContext};
use crate::host::Host;
use crate::settings::Settings;
use crate::verdict::{Flow, PluginError, Verdict};

/// A plugin that can be named in the config.
pub trait Kind: Send + Sync {
    /// The name.
    fn name(&self) -> &'static str;

    /// Reads the settings of one entry. What is wrong with them is said to `settings` ([`Settings::fault`]), all of it at once; then `None`
    /// may be returned. What is built must not start anything: a config that is only checked is built too.
    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>>;
}

/// What must have been read before `on_request`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: it looks at header fields and facts.
    #[default]
    Facts,
    /// The bytes of the body, in the client's dialect.
    Body,
    /// The decoded request. A body that breaks a rule of its dialect is then refused, though an upstream might have taken it.
    Request,
}

/// What a plugin wants of an answer. The less, the less it costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sees {
    /// Nothing at all.
    #[default]
    Nothing,
    /// That it has ended.
    End,
    /// Its header fields, and its end.
    Head,
    /// All that, and its events. What an upstream says in the client's own dialect is read for that, and said again.
    Events,
    /// All that, and its bytes in the client's dialect: every event is [`ChatEvent::Raw`], of a whole answer exactly one.
    Bytes,
}

/// One entry of the config at work; shared by all requests.
#[async_trait]
pub trait Plugin: Send + Sync {
    /// What its requests need.
    fn needs(&self) -> Needs {
        Needs::Facts
    }

    /// Begins a request. Cheap: nothing has been looked at.
    fn begin(&self) -> Box<dyn Hooks>;

    /// What it was made of besides its settings, such as a file: another number is another plugin.
    fn revision(&self) -> u64 {
        0
    }

    /// How often [`Plugin::tick`] is called while the plugin is in use; `None`: never.
    fn tick_period(&self) -> Option<Duration> {
        None
    }

    /// Numbers that it counts itself, for the metrics. There are few, and their names do not come from requests.
    fn values(&self) -> Vec<(String, f64)> {
        Vec::new()
    }

    /// Work that hangs on no request.
    async fn tick(&self, _host: Arc<dyn Host>) {}
}

/// A plugin's part in one request. Dropped when the request has ended, whatever became of it.
#[async_trait]
pub trait Hooks: Send {
    /// Before anything is decided about the request. Dropping the future must be safe at every await: that is what happens when the time is
    /// over or the client leaves.
    async fn on_request(&mut self, _request: &mut RequestContext) -> Result<Verdict, PluginError> {
        Ok(Verdict::Pass)
    }

    /// What it wants of the answer; asked once, after `on_request`.
    fn sees(&self) -> Sees {
        Sees::Nothing
    }

    /// Header fields of an answer that has begun. Not called for errors, nor when the head of a slow stream had to go out before.
    fn on_head(&mut self, _head: &mut AnswerHead) -> Result<(), PluginError> {
        Ok(())
    }

    /// The next events; what is left in `events` goes on. Text may be held back, and must be let go with the choice's `Finish`, or when
    /// `end` says that these were the last. On an error, what stands in `events` is taken to be unchanged.
    fn on_event(&mut self, _events: &mut Vec<ChatEvent>, _end: bool) -> Result<Flow, PluginError> {
        Ok(Flow::Go)
    }

    /// Lets go of what is held back, unchanged: this plugin has failed and the answer goes on without it.
    fn release(&mut self, _out: &mut Vec<ChatEvent>) {}

    /// The request has ended. Called exactly once for a request that `on_request` has seen, however it ended.
    fn on_end(&mut self, _facts: &EndFacts) {}
}
