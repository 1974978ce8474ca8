//! `[hub]`: the hub that models are pulled from, and the local store that pools find them in.

use std::path::{Path, PathBuf};

use penstock_base::Secret;
use penstock_http::client::Target;
use penstock_models::{Hub, Store, StoreError};

use super::raw::{Document, Reader};
use super::snapshot::default_state_dir;

/// Name of the models' folder in the state folder.
const FOLDER: &str = "models";
/// Most bytes that are read of a token's file.
const TOKEN_BYTES_MAX: usize = 4096;

/// Hub of the config. Its token is read when a model is pulled: a gateway needs none.
#[derive(Clone, Debug)]
pub struct HubConfig {
    /// Folder of the models.
    pub folder: Option<PathBuf>,
    /// Address of the hub; `None`: the config names none.
    pub endpoint: Option<Target>,
    /// Addresses that are asked before it, without a token.
    pub mirrors: Vec<Target>,
    /// Environment variable that holds the token; `None`: the config names none.
    pub token_env: Option<String>,
    /// File that holds the token.
    pub token_file: Option<PathBuf>,
    /// Certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Requests at once.
    pub connections: usize,
}

impl HubConfig {
    /// Hub to pull from: the config, with `HF_ENDPOINT` and `HF_TOKEN` of the environment where it names neither endpoint nor token.
    ///
    /// # Errors
    /// A token that is named is missing, or an address of the environment is none.
    pub fn hub(&self, env: &dyn Fn(&str) -> Option<String>) -> Result<Hub, String> {
        let endpoint = match (&self.endpoint, env("HF_ENDPOINT").filter(|url| !url.is_empty())) {
            (Some(endpoint), _) => endpoint.clone(),
            (None, Some(url)) => Target::parse(&url).map_err(|error| format!("HF_ENDPOINT: {error}"))?,
            (None, None) => Target::parse(ENDPOINT).map_err(|error| format!("hub.endpoint: {error}"))?,
        };
        let token = match (&self.token_file, &self.token_env) {
            (Some(path), _) => Some(file_token(path)?),
            (None, Some(name)) => {
                Some(env(name).ok_or_else(|| format!("hub.token_env: the environment variable {name} is not set"))?)
            }
            (None, None) => env("HF_TOKEN"),
        };
        let token = token.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()).map(Secret::new);
        let Self { mirrors, ca_file, connections, .. } = self.clone();
        Ok(Hub { endpoint, mirrors, token, ca_file, connections })
    }

    /// Store of models; `state_dir`: state folder of the gateway, which holds it by default.
    pub fn store(&self, state_dir: &Path) -> Store {
        Store::at(self.folder.clone().unwrap_or_else(|| state_dir.join(FOLDER)))
    }
}

/// Hub where neither config nor environment names one.
pub(super) const ENDPOINT: &str = "https://huggingface.co";

/// Reads `[hub]`. `folder`: folder of the command line, which wins.
pub(super) fn hub(document: &Document<'_>, folder: Option<&PathBuf>) -> HubConfig {
    let table = &document.table("hub");
    let target = |name: &'static str, url: &str| Target::parse(url).map_err(|error| table.fault(name, error)).ok();
    let [token_file, ca_file, typed] =
        ["token_file", "ca_file", "folder"].map(|name| table.text(name).map(PathBuf::from));
    let token_env = table.text("token_env");
    if token_env.is_some() && token_file.is_some() {
        table.fault("token_env", "at most one of token_env and token_file");
    }
    HubConfig {
        folder: folder.cloned().or(typed),
        endpoint: table.text("endpoint").and_then(|url| target("endpoint", &url)),
        mirrors: table.texts("mirrors").iter().filter_map(|url| target("mirrors", url)).collect(),
        token_env,
        token_file,
        ca_file,
        connections: table.number("connections", 1..=64) as usize,
    }
}

/// Where the names of models are looked up while a config is read.
pub(super) struct Shelf(Option<Store>);

impl Shelf {
    /// Store of a config whose state folder is `state_dir`, if it names one.
    pub(super) fn new(hub: &HubConfig, state_dir: Option<&PathBuf>) -> Self {
        let state = state_dir.cloned().or_else(|| default_state_dir().ok());
        Self(state.or_else(|| hub.folder.clone()).map(|state| hub.store(&state)))
    }

    /// Path of a pool's model: a path that exists as it is, the name of a model of the store as the path of its files. A name that is
    /// not in the store stays, and is refused where the model is opened.
    ///
    /// # Errors
    /// Several models of the store have the name.
    pub(super) fn path(&self, model: PathBuf) -> Result<PathBuf, String> {
        let (Some(store), Some(name)) = (&self.0, model.to_str()) else { return Ok(model) };
        if model.exists() || name.starts_with(['/', '.', '~']) {
            return Ok(model);
        }
        match store.find(name) {
            Ok(found) => Ok(found.path()),
            Err(error @ StoreError::Several { .. }) => Err(error.to_string()),
            Err(_) => Ok(model),
        }
    }

    /// Path of the model that a table names.
    pub(super) fn model(&self, table: &Reader<'_, '_>) -> Option<PathBuf> {
        let model = PathBuf::from(table.text("model")?);
        self.path(model.clone()).map_err(|error| table.fault("model", error)).ok().or(Some(model))
    }
}

/// Path of the model that a worker's command line names: a path, or the name of a model in the default store.
pub fn named_model(model: PathBuf) -> PathBuf {
    let store = default_state_dir().ok().map(|state| Store::at(state.join(FOLDER)));
    Shelf(store).path(model.clone()).unwrap_or(model)
}

fn file_token(path: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("hub.token_file: {}: {error}", path.display()))?;
    match text.trim() {
        "" => Err(format!("hub.token_file: {} is empty", path.display())),
        token if token.len() > TOKEN_BYTES_MAX => {
            Err(format!("hub.token_file: {} is too long for a token", path.display()))
        }
        token => Ok(token.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use crate::{Overrides, load};

    fn hub(text: &str, env: &[(&str, &str)]) -> Result<String, String> {
        let of = |name: &str| env.iter().find(|(have, _)| *have == name).map(|(_, value)| (*value).to_owned());
        let config =
            load(Some(("penstock.toml", text)), &Overrides::default(), &of).map_err(|faults| faults.to_string())?;
        let hub = config.hub.hub(&of)?;
        let token = hub.token.as_ref().map_or("none", |token| token.expose());
        Ok(format!("{} {token} {}", hub.endpoint, hub.mirrors.len()))
    }

    #[test]
    fn the_config_wins_over_the_environment() {
        let env = [("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_TOKEN", "hf_x\n"), ("MINE", "mine")];
        assert_eq!(hub("", &[]).as_deref(), Ok("https://huggingface.co none 0"));
        assert_eq!(hub("", &env).as_deref(), Ok("http://127.0.0.1:9 hf_x 0"));
        let typed = "[hub]\nendpoint = \"https://hub.example/hf\"\nmirrors = [\"http://m\"]\ntoken_env = \"MINE\"\n";
        assert_eq!(hub(typed, &env).as_deref(), Ok("https://hub.example/hf mine 1"));
        assert_eq!(
            hub("[hub]\nendpoint = \"https://huggingface.co\"\n", &env).as_deref(),
            Ok("https://huggingface.co hf_x 0")
        );
    }

    #[test]
    fn faults_name_the_key() {
        let fault = |text: &str, part: &str| {
            let error = hub(text, &[("HF_ENDPOINT", "nowhere")]).expect_err(text);
            assert!(error.contains(part), "{error}");
        };
        fault("", "HF_ENDPOINT");
        fault("[hub]\nendpoint = \"hub.example\"\n", "hub.endpoint");
        fault("[hub]\nendpoint = \"https://h\"\ntoken_env = \"UNSET\"\n", "UNSET is not set");
        fault("[hub]\nendpoint = \"https://h\"\ntoken_file = \"/nowhere/token\"\n", "/nowhere/token");
        fault("[hub]\ntoken_file = \"/nowhere\"\ntoken_env = \"X\"\n", "at most one");
        fault("[hub]\nconnections = 0\n", "hub.connections");
    }
}
