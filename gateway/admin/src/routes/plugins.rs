//! Plugins of the config, in the order in which requests pass them.

use axum::Json;
use axum::extract::State;
use penstock_config::{OnFail, PluginConfig};
use serde::Serialize;
use utoipa::ToSchema;

use crate::extract::Page;
use crate::state::Admin;

/// A configured plugin, as the admin API returns it.
#[derive(Serialize, ToSchema)]
pub(crate) struct Plugin {
    /// Name in logs and metrics.
    id: String,
    /// Name of the plugin.
    name: String,
    /// Routes that the plugin handles, as names or prefixes that end in *; empty: all. So for the lists below.
    routes: Vec<String>,
    models: Vec<String>,
    keys: Vec<String>,
    teams: Vec<String>,
    /// Behaviour when the plugin fails: open (the request goes on without the plugin) or closed (the request is refused).
    on_fail: &'static str,
    /// Longest time of one hook.
    timeout_ms: u64,
}

impl From<&PluginConfig> for Plugin {
    fn from(config: &PluginConfig) -> Self {
        Self {
            id: config.id.to_string(),
            name: config.name.clone(),
            routes: config.routes.clone(),
            models: config.models.clone(),
            keys: config.keys.clone(),
            teams: config.teams.clone(),
            on_fail: match config.on_fail {
                OnFail::Open => "open",
                OnFail::Closed => "closed",
            },
            timeout_ms: config.timeout.as_millis() as u64,
        }
    }
}

/// Plugins, in the order of the config.
#[utoipa::path(get, path = "/admin/v1/plugins", tag = "plugins", operation_id = "list_plugins",
    responses((status = 200, description = "Plugins.", body = Page<Plugin>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(State(admin): State<Admin>) -> Json<Page<Plugin>> {
    let serving = admin.gateway.serving();
    Json(Page { data: serving.config.plugins.iter().map(Plugin::from).collect(), next: None })
}
