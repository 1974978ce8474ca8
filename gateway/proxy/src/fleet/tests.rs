use std::fs;
use std::path::PathBuf;

use penstock_config::Overrides;

use super::*;
use crate::reload::Source;

/// Folder with a model of its own, deleted at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("penstock-fleet-files-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("model")).expect("a folder");
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
            fs::copy(demo.join(name), folder.join("model").join(name)).expect("copied");
        }
        Self(folder)
    }

    /// Puts another file in the place of one of the model's, as people are told to.
    fn replace(&self, name: &str, content: &str) {
        let (next, place) = (self.0.join("next"), self.0.join("model").join(name));
        fs::create_dir_all(place.parent().expect("a folder")).expect("a folder");
        fs::write(&next, content).expect("written");
        fs::rename(&next, place).expect("renamed");
    }

    /// Config of a pool whose workers, elsewhere, are not there.
    fn config(&self) -> Snapshot {
        let folder = self.0.display();
        let text = format!(
            "[server]\nstate_dir = \"{folder}/state\"\n[[pools]]\nid = \"own\"\nmodel = \"{folder}/model\"\nconnect = [\"unix:{folder}/w.sock\"]\n"
        );
        Source::new(None, Overrides::default()).load(&text).expect("valid")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn command() -> WorkerCommand {
    WorkerCommand {
        program: "/bin/false".into(),
        identity: String::new(),
        args: |_| Vec::new(),
        inspect: |_| Err("no model can be loaded in this test".into()),
        weights_key: |_, _| Ok(None),
        layout: CopyLayout { key: |_| None, fill: |_, _, _, _, _| Ok(false) },
        demo: &[],
    }
}

#[test]
fn files_that_were_replaced_at_their_path_make_another_pool() {
    let scratch = Scratch::new();
    let config = scratch.config();
    let fleet = Fleet::start(&config, command()).expect("started");
    let plan = || fleet.plan(&config).expect("it can be served");
    let starts = |plan: &Plan| matches!(plan.0[..], [Step::Start(_)]);
    assert!(!starts(&plan()), "nothing has changed");
    scratch.replace("README.md", "# A model");
    scratch.replace(".cache/lock.json", "{}");
    assert!(!starts(&plan()), "no part of the model");
    for (name, content) in
        [("tokenizer_config.json", "{}"), ("1_Pooling/config.json", "{}"), ("chat_template.jinja", "")]
    {
        scratch.replace(name, content);
        let changed = plan();
        assert!(starts(&changed), "{name}");
        fleet.carry_out(changed).expect("started");
        assert!(!starts(&plan()), "{name}: taken up");
    }
    scratch.replace("tokenizer.json", "{");
    assert!(matches!(plan().0[..], [Step::Keep(..)]), "half of a file refuses no other part of a config");
    let other = Snapshot { pools: vec![PoolConfig { sequences_max: 3, ..config.pools[0].clone() }], ..config.clone() };
    assert!(fleet.plan(&other).is_err(), "what is asked for must be served");
}
