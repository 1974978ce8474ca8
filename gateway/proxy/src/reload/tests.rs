use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use penstock_store::{Sqlite, SqliteOptions, Store};

use super::*;
use crate::fleet::WorkerCommand;
use penstock_config::Overrides;
use penstock_pool::weights_cache::CopyLayout;
use penstock_telemetry::AccessLog;

/// Gateway with one provider that is never asked, its config in a file.
struct Bench {
    live: Arc<Live>,
    gateway: Arc<Gateway>,
    file: PathBuf,
    level: Arc<Mutex<String>>,
}

fn text(more: &str) -> String {
    format!("[[providers]]\nid = \"p\"\nbase_url = \"http://127.0.0.1:1/v1\"\nmodels = [\"m\"]\n{more}")
}

fn named(name: &str) -> String {
    text(&format!("[[models]]\nname = \"{name}\"\nto = [{{ provider = \"p\", model = \"m\" }}]\n"))
}

fn store(folder: &std::path::Path) -> Arc<dyn Store> {
    let options = SqliteOptions { path: folder.join("store.db"), bytes_max: 0 };
    Arc::new(Sqlite::open(&options).expect("a store"))
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("penstock-live-{name}-{}", std::process::id()));
    // Left behind by a process of the same number.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

impl Bench {
    fn new(name: &str, first: &str) -> Self {
        let folder = folder(name);
        let store = store(&folder);
        Self::on(folder.join("penstock.toml"), first, Some(store))
    }

    fn on(file: PathBuf, first: &str, store: Option<Arc<dyn Store>>) -> Self {
        fs::write(&file, first).expect("written");
        Self::begun(file, first, None, store)
    }

    /// Bench whose process begins; `beside`: the file's text, where another one is handed over.
    fn begun(file: PathBuf, first: &str, beside: Option<String>, store: Option<Arc<dyn Store>>) -> Self {
        let overrides = Overrides { access_log: Some("off".into()), ..Overrides::default() };
        let source = Source::new(Some(file.clone()), overrides);
        let config = source.load(first).expect("valid");
        let command = WorkerCommand {
            program: "/bin/false".into(),
            identity: String::new(),
            args: |_| Vec::new(),
            inspect: |_| Err("no model can be loaded in this test".into()),
            is_on_gpu: |_| Ok(false),
            weights_key: |_, _| Ok(None),
            layout: CopyLayout { key: |_| None, fill: |_, _, _, _, _| Ok(false) },
            demo: &[],
        };
        let fleet = Arc::new(Fleet::start(&config, command).expect("no pools"));
        let log = AccessLog::open("off").expect("off");
        let providers = penstock_provider::all(&config.providers).expect("providers");
        let gateway = Gateway::new(config.clone(), log, Vec::new(), providers);
        let gateway = Arc::new(match store {
            Some(store) => gateway.with_store(store),
            None => gateway,
        });
        let level = Arc::<Mutex<String>>::default();
        let told = level.clone();
        let set = Box::new(move |filter: &str| {
            filter.clone_into(&mut told.lock().expect("level"));
            Ok(())
        });
        let begin = Begin { text: first.to_owned(), config, file: beside };
        let live = Live::new(gateway.clone(), fleet, source, begin, set);
        Self { live, gateway, file, level }
    }

    /// Text of the file, where an upgrade would hand over another one.
    fn file_beside(&self) -> Option<String> {
        self.live.withhold_changes().1.map(|(_, file)| file)
    }

    fn metric(&self, name: &str) -> String {
        let metrics = self.gateway.render_metrics();
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)).expect("it is shown");
        line.trim().to_owned()
    }

    fn names(&self) -> Vec<String> {
        let models = self.gateway.serving();
        models.models().listed().iter().map(|entry| entry.name.to_string()).collect()
    }
}

#[test]
fn versions_go_forth_and_back() {
    let bench = Bench::new("versions", &named("one"));
    let (first, _) = bench.live.current();
    let two = bench.live.apply(&named("two"), &By::new("ops"), Some(first)).expect("applied");
    assert_eq!(two.changes.iter().map(Change::path).collect::<Vec<_>>(), ["-models[one]", "+models[two]"]);
    assert_eq!((bench.names(), two.persisted), (vec!["two".to_owned(), "m".to_owned()], false));

    let late = bench.live.apply(&named("three"), &By::new("ops"), Some(first));
    assert!(
        matches!(late, Err(ApplyError::Conflict { expected, current }) if expected == first && current == two.version)
    );
    let bad = bench.live.apply("nonsense = 1", &By::new("ops"), None);
    assert!(matches!(bad, Err(ApplyError::Faults(_))));
    let pool = bench.live.apply(&format!("{}[[pools]]\nid = \"own\"\n", named("two")), &By::new("ops"), None);
    assert!(matches!(pool, Err(ApplyError::Pool(_))));
    assert!(matches!(bench.live.rollback(99, &By::new("ops"), None), Err(ApplyError::Unknown(99))));
    assert_eq!(bench.names()[0], "two", "nothing of these has changed anything");

    for stale in [
        bench.live.rollback(first, &By::new("ops"), Some(first)),
        bench.live.reload_expected(&By::new("ops"), Some(first)),
    ] {
        assert!(matches!(stale, Err(ApplyError::Conflict { .. })), "{stale:?}");
    }
    let back = bench.live.rollback(first, &By::new("ops"), Some(two.version)).expect("applied");
    assert_eq!((bench.names()[0].as_str(), back.version > two.version), ("one", true));
    let history = bench.live.history();
    let told: Vec<_> = history.iter().map(|entry| (entry.who.as_str(), entry.outcome.as_str())).collect();
    let ops = |outcome| ("ops", outcome);
    assert_eq!(told, [ops("applied"), ops("refused"), ops("refused"), ops("applied"), ("start", "applied")]);
    assert_eq!(history[0].note, format!("back to version {first}"));
    assert_eq!(bench.live.text_of(two.version).as_deref(), Some(named("two").as_str()));

    // Another process with the same store goes on counting, and knows the same text again.
    let store = Some(store(bench.file.parent().expect("a folder")));
    let again = Bench::on(bench.file.clone(), &named("one"), store);
    assert_eq!(again.live.current().0, back.version);
    assert_eq!(again.live.history().len(), history.len());
}

#[test]
fn what_was_in_force_is_freed_with_its_last_request() {
    let bench = Bench::new("freed", &named("one"));
    let request = bench.gateway.serving();
    let watched = Arc::downgrade(&request);
    for round in 0..50 {
        let more = format!("idle_timeout_ms = {}\n", 1000 + round);
        let middle = Arc::downgrade(&bench.gateway.serving());
        bench.live.apply(&text(&more), &By::new("ops"), None).expect("applied");
        assert_eq!(middle.upgrade().is_some(), round == 0, "only what a request holds stays");
    }
    let (provider, now) = (Arc::downgrade(&request.providers()[0]), bench.gateway.serving());
    assert!(!Arc::ptr_eq(&request.providers()[0], &now.providers()[0]));
    drop(request);
    assert!(watched.upgrade().is_none() && provider.upgrade().is_none());
}

#[test]
fn what_is_the_same_stays_the_same() {
    let bench = Bench::new("same", &named("one"));
    let before = bench.gateway.serving();
    bench.live.apply(&named("two"), &By::new("ops"), None).expect("applied");
    let after = bench.gateway.serving();
    assert!(Arc::ptr_eq(&before.providers()[0], &after.providers()[0]));
    bench.live.reload(&By::new("signal")).expect("applied");
    assert_eq!(bench.names()[0], "one", "the file wins when it is read");
}

#[test]
fn what_is_fixed_waits_and_the_rest_applies() {
    let bench = Bench::new("fixed", &text(""));
    let server = "[server]\nthreads = 7\ngrace_ms = 5\n[store]\npath = \"/elsewhere.db\"\n[log]\nlevel = \"debug\"\n";
    let applied = bench.live.apply(&text(server), &By::new("ops"), None).expect("applied");
    assert_eq!(applied.pending, ["server.threads", "store.path"]);
    let config = bench.gateway.serving().config.clone();
    assert!(config.threads != 7 && config.store.path.is_none());
    assert_eq!((config.grace.as_millis(), bench.level.lock().expect("level").as_str()), (5, "debug"));
    let back = bench.live.apply(&text(""), &By::new("ops"), None).expect("applied");
    assert_eq!(back.pending, Vec::<String>::new());
}

#[test]
fn a_log_level_that_was_set_stays_until_the_config_has_another() {
    let level = |level: &str, more: &str| text(&format!("{more}[log]\nlevel = \"{level}\"\n"));
    let bench = Bench::new("level", &level("warn", ""));
    let apply = |text: &str| drop(bench.live.apply(text, &By::new("ops"), None).expect("applied"));
    let set = || bench.level.lock().expect("level").clone();
    "trace".clone_into(&mut bench.level.lock().expect("level"));
    apply(&level("warn", "idle_timeout_ms = 1000\n"));
    bench.live.reload(&By::new("signal")).expect("read");
    assert_eq!(set(), "trace", "nothing was said about the level");
    apply(&level("debug", ""));
    assert_eq!(set(), "debug");
    bench.live.rollback(1, &By::new("ops"), None).expect("applied");
    assert_eq!(set(), "warn");
}

#[test]
fn the_file_is_written_where_that_is_allowed() {
    let bench = Bench::new("writes", &named("one"));
    let real = bench.file.with_file_name("real.toml");
    fs::rename(&bench.file, &real).expect("moved");
    std::os::unix::fs::symlink(&real, &bench.file).expect("linked");
    fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).expect("ours");
    let allowed = |name: &str| format!("[server]\nconfig_writes = true\n{}", named(name));
    let applied = bench.live.apply(&allowed("two"), &By::new("ops"), None).expect("applied");
    assert!(applied.persisted && bench.live.is_persisted());
    assert_eq!(fs::read_to_string(&real).expect("there"), allowed("two"));
    assert_eq!(fs::metadata(&real).expect("there").permissions().mode() & 0o777, 0o640);
    assert!(fs::symlink_metadata(&bench.file).expect("there").is_symlink(), "the link stays");
    bench.live.reload_changed(&By::new("file"));
    assert_eq!(bench.live.current().0, applied.version, "what was written is in force already");

    let bad = bench.live.apply(&allowed("two").replace("models = [\"m\"]", "models = 3"), &By::new("ops"), None);
    assert!(bad.is_err());
    assert_eq!(fs::read_to_string(&real).expect("there"), allowed("two"));
}

#[test]
fn a_text_of_the_file_that_was_not_in_force_is_not_written_over() {
    let allowed = |name: &str| format!("[server]\nconfig_writes = true\n{}", named(name));
    let bench = Bench::new("unread", &allowed("one"));
    let (apply, there) = (
        |name: &str| bench.live.apply(&allowed(name), &By::new("ops"), None),
        || fs::read_to_string(&bench.file).expect("there"),
    );
    apply("two").expect("applied");
    // Saved by somebody, and not read yet: debounce, a watch that is off.
    fs::write(&bench.file, allowed("saved")).expect("written");
    let lost = apply("three");
    assert!(matches!(&lost, Err(ApplyError::Unread(path)) if path.ends_with("penstock.toml")), "{lost:?}");
    let edited: Result<Applied, ApplyError> = bench.live.edit(&By::new("ops"), |_| Ok(allowed("three")));
    assert!(matches!(edited, Err(ApplyError::Unread(_))) && bench.live.rollback(1, &By::new("ops"), None).is_err());
    assert_eq!((there(), bench.names()[0].as_str()), (allowed("saved"), "two"), "nothing has changed");
    // The same text may be applied; it is what the file has.
    apply("saved").expect("applied");
    fs::write(&bench.file, allowed("again")).expect("written");
    bench.live.reload(&By::new("signal")).expect("read");
    apply("four").expect("what was read may be written over");

    // A text that was refused is in nobody's history of configs in force, however often others are applied.
    fs::write(&bench.file, "nonsense = 1").expect("written");
    bench.live.reload_changed(&By::new("file"));
    assert!(matches!(apply("five"), Err(ApplyError::Unread(_))));
    let beside = bench.live.apply(&named("beside"), &By::new("ops"), None).expect("a config that writes nothing");
    assert!(!beside.persisted && matches!(apply("five"), Err(ApplyError::Unread(_))) && there() == "nonsense = 1");
    fs::write(&bench.file, allowed("mended")).expect("written");
    bench.live.reload_changed(&By::new("file"));
    assert!(apply("six").expect("applied").persisted && there() == allowed("six"));
    // The text in force, which somebody has put into the file.
    bench.live.apply(&named("beside"), &By::new("ops"), None).expect("applied");
    fs::write(&bench.file, named("beside")).expect("written");
    assert!(apply("seven").expect("nothing is lost").persisted && there() == allowed("seven"));
}

#[test]
fn without_a_store_the_history_is_in_memory() {
    let file = folder("memory").join("penstock.toml");
    let bench = Bench::on(file, &named("one"), None);
    bench.live.apply(&named("two"), &By::new("ops"), None).expect("applied");
    assert_eq!(bench.live.history().iter().map(|entry| entry.version).collect::<Vec<_>>(), [2, 1]);
    bench.live.rollback(1, &By::new("ops"), None).expect("applied");
    for round in 0..40 {
        bench.live.apply(&named(&format!("n{round}")), &By::new("ops"), None).expect("applied");
    }
    assert_eq!(bench.live.history().len(), 16, "bounded");
}

#[test]
fn no_number_stands_for_two_configs() {
    let bench = Bench::on(folder("numbers").join("penstock.toml"), &named("one"), None);
    let history = History::new(bench.gateway);
    // Texts of a store whose numbers are their places; `None`: it is away.
    let stored = std::cell::RefCell::new(Some(Vec::<String>::new()));
    let keep_as = |text: &str, outcome: &str| {
        let new = penstock_store::NewConfig {
            text: text.into(),
            sha256: String::new(),
            at: 1,
            actor: "ops".into(),
            note: String::new(),
            outcome: outcome.into(),
        };
        history.numbered(&new, |new| {
            let mut stored = stored.borrow_mut();
            let texts = stored.as_mut()?;
            texts.push(new.text);
            Some(texts.len() as u64)
        })
    };
    let keep = |text: &str| keep_as(text, "applied");
    let there = || stored.borrow().clone().expect("there");
    assert_eq!(keep("a"), 1);
    let away = stored.take();
    assert_eq!((keep("b"), keep("c")), (2, 3));
    stored.replace(away);
    assert_eq!((keep("d"), there()), (4, ["a", "b", "c", "d"].map(str::to_owned).to_vec()));
    // Another gateway has stored one meanwhile.
    let mut away = stored.take().expect("there");
    assert_eq!(keep("e"), 5);
    away.push("other".into());
    stored.replace(Some(away));
    assert_eq!((keep("f"), &there()[4..]), (7, &["other", "e", "f"].map(str::to_owned)[..]));
    assert_eq!((history.text(6).as_deref(), history.text(5)), (Some("e"), None));
    // Two were missed: the first gets the number that the second was told.
    let mut away = stored.take().expect("there");
    assert_eq!((keep("g"), keep("h"), history.in_force()), (8, 9, Some(9)));
    away.push("another".into());
    stored.replace(Some(away));
    assert_eq!((keep_as("i", "refused"), history.in_force()), (11, Some(10)));
    let texts: Vec<_> = (8..12).map(|version| history.text(version).unwrap_or_default()).collect();
    assert_eq!(texts, ["", "g", "h", "i"]);
    // The store was emptied.
    stored.replace(Some(Vec::new()));
    assert_eq!((keep("j"), there().len()), (12, 12));
    stored.replace(Some(Vec::new()));
    (0..100).for_each(|round| _ = keep(&round.to_string()));
    assert!(keep("k") > 12);
}

#[test]
fn a_file_that_is_gone_or_empty_or_too_long_changes_nothing() {
    let bench = Bench::new("gone", &named("one"));
    fs::write(&bench.file, "").expect("written");
    bench.live.reload_changed(&By::new("file"));
    fs::write(&bench.file, vec![b'#'; CONFIG_BYTES_MAX + 1]).expect("written");
    assert!(matches!(bench.live.reload(&By::new("signal")), Err(ApplyError::Read(_))));
    fs::remove_file(&bench.file).expect("removed");
    bench.live.reload_changed(&By::new("file"));
    assert!(matches!(bench.live.reload(&By::new("signal")), Err(ApplyError::Read(_))));
    assert_eq!(bench.names()[0], "one");
    // By SIGHUP and by an admin too: every default at once is not meant.
    for nothing in ["", "\n  \n"] {
        fs::write(&bench.file, nothing).expect("written");
        assert!(matches!(bench.live.reload(&By::new("signal")), Err(ApplyError::Empty(_))));
    }
    assert_eq!(bench.names()[0], "one");
    let metrics = bench.gateway.render_metrics();
    assert!(metrics.contains("penstock_config_last_reload_ok 0"), "{metrics}");
    assert!(metrics.contains("penstock_config_reloads_total{outcome=\"refused\"} 4"));
    fs::write(&bench.file, "# defaults\n").expect("written");
    let demo = bench.live.reload(&By::new("signal"));
    assert!(matches!(demo, Err(ApplyError::Pool(_))), "a comment is a text: every default, and so the demo model");
}

#[test]
fn what_an_admin_applies_stays_until_the_file_changes() {
    let bench = Bench::new("stays", &named("one"));
    let look = || bench.live.reload_changed(&By::new("file"));
    let (first, _) = bench.live.current();
    let two = bench.live.apply(&named("two"), &By::new("ops"), None).expect("applied");
    look();
    assert_eq!((bench.live.current().0, bench.names()[0].as_str()), (two.version, "two"));
    // The same text in another file, as an editor leaves it that changes nothing.
    fs::remove_file(&bench.file).expect("removed");
    look();
    fs::write(&bench.file, named("one")).expect("written");
    look();
    assert_eq!(bench.names()[0], "two");
    let back = bench.live.rollback(first, &By::new("ops"), None).expect("applied");
    assert!(back.persisted, "it is what the file says");
    let again = bench.live.rollback(two.version, &By::new("ops"), None).expect("applied");
    look();
    assert_eq!((bench.live.current().0, bench.names()[0].as_str()), (again.version, "two"), "a roll-back stays too");
    assert!(!bench.live.is_persisted());

    // A file that is refused changes nothing, and what an admin applies after it stays as well.
    fs::write(&bench.file, "nonsense = 1").expect("written");
    look();
    assert_eq!(bench.names()[0], "two");
    bench.live.apply(&named("three"), &By::new("ops"), None).expect("applied");
    look();
    assert_eq!(bench.names()[0], "three");

    fs::write(&bench.file, named("four")).expect("written");
    look();
    assert_eq!(bench.names()[0], "four", "the file has changed");
    let note = &bench.live.history()[0].note;
    assert!(note.contains("which was not in it"), "{note}");
    // A file edit to the text that an admin has applied changes nothing, and a restart comes up with it.
    bench.live.apply(&named("five"), &By::new("ops"), None).expect("applied");
    let version = bench.live.current().0;
    fs::write(&bench.file, named("five")).expect("written");
    look();
    assert_eq!((bench.live.current().0, bench.live.is_persisted()), (version, true));
}

#[test]
fn a_refused_file_is_tried_again_as_long_as_nothing_else_is_applied() {
    let bench = Bench::new("again", &named("one"));
    let key = bench.file.with_file_name("key");
    let provider = text(&format!("key_file = {key:?}\n")).replace("\"p\"", "\"q\"");
    fs::write(&bench.file, provider).expect("written");
    bench.live.reload_changed(&By::new("file"));
    assert_eq!(bench.names()[0], "one");
    fs::write(&key, "secret").expect("written");
    bench.live.reload_changed(&By::new("file"));
    assert_eq!(bench.names(), ["m"], "the key file that was missing is there");
}

#[test]
fn a_restart_says_that_the_file_has_won() {
    let bench = Bench::new("restart", &named("one"));
    let (first, _) = bench.live.current();
    let two = bench.live.apply(&named("two"), &By::new("ops"), None).expect("applied");
    let folder = bench.file.parent().expect("a folder");
    let again = Bench::on(bench.file.clone(), &named("one"), Some(store(folder)));
    let newest = again.live.history().remove(0);
    assert_eq!((again.names()[0].as_str(), newest.version), ("one", again.live.current().0));
    assert!(newest.version > two.version && newest.version > first);
    assert_eq!(
        (newest.who.as_str(), newest.note),
        ("start", format!("the file, in place of version {} by ops", two.version))
    );
}

#[test]
fn what_an_admin_applied_stays_over_an_upgrade() {
    let bench = Bench::new("upgrade", &named("one"));
    let two = bench.live.apply(&named("two"), &By::new("ops"), None).expect("applied");
    let (beside, store) = (bench.file_beside(), store(bench.file.parent().expect("a folder")));
    assert_eq!(beside.as_deref(), Some(named("one").as_str()));
    let next = Bench::begun(bench.file.clone(), &named("two"), beside, Some(store));
    next.live.reload_changed(&By::new("file"));
    assert_eq!((next.live.current().0, next.names()[0].as_str()), (two.version, "two"));
    assert_eq!(next.file_beside(), Some(named("one")), "the upgrade after this one hands it over too");
    fs::write(&next.file, named("three")).expect("written");
    next.live.reload_changed(&By::new("file"));
    assert_eq!((next.names()[0].as_str(), next.file_beside()), ("three", None));
}

#[test]
fn without_a_file_a_signal_undoes_nothing() {
    let bench = Bench::new("none", &named("one"));
    let live = Live::new(
        bench.gateway.clone(),
        bench.live.fleet.clone(),
        Source::default(),
        Begin { text: String::new(), config: (*bench.gateway.serving().config).clone(), file: None },
        Box::new(|_| Ok(())),
    );
    let applied = live.apply(&named("two"), &By::new("ops"), None).expect("applied");
    live.reload(&By::new("signal")).expect("reloaded");
    assert_eq!((live.current(), bench.names()[0].as_str()), ((applied.version, named("two")), "two"));
    assert!(!live.is_persisted());
}

#[test]
fn addresses_of_a_name_are_targets_under_every_config() {
    let text = "[[providers]]\nid = \"gpu\"\nbase_url = \"http://vllm.svc:8000/v1\"\nresolve = true\n\
        [[models]]\nname = \"m\"\nto = [{ provider = \"gpu\" }]\n";
    let bench = Bench::new("members", text);
    let targets = || {
        let states = bench.gateway.serving().models().targets_of("m").expect("an entry");
        states.iter().map(|state| state.id.to_string()).collect::<Vec<_>>()
    };
    let follow = |last: &[u8]| {
        let mut members = penstock_config::Members::default();
        members.set("gpu", last.iter().map(|last| ([10, 0, 0, *last], 8000).into()).collect());
        bench.live.follow_members(members);
    };
    assert_eq!((targets(), bench.gateway.serving().models().pickable()), (vec!["gpu/m".to_owned()], 0));
    let mut swaps = bench.gateway.swaps();
    follow(&[9, 7]);
    assert!(swaps.has_changed().expect("there") && bench.gateway.serving().models().pickable() == 1);
    swaps.mark_unchanged();
    assert_eq!(targets(), ["gpu@10.0.0.7:8000/m", "gpu@10.0.0.9:8000/m"]);
    let provider = |id: &str| bench.gateway.serving().providers().iter().find(|one| one.id() == id).cloned();
    let (before, version) = (provider("gpu@10.0.0.9:8000").expect("there"), bench.live.current().0);
    let more = format!("{text}aliases = [\"n\"]\n");
    bench.live.apply(&more, &By::new("ops"), Some(version)).expect("applied");
    assert_eq!(targets().len(), 2, "another config keeps the addresses");
    follow(&[9, 12]);
    assert_eq!(targets(), ["gpu@10.0.0.9:8000/m", "gpu@10.0.0.12:8000/m"]);
    assert!(Arc::ptr_eq(&provider("gpu@10.0.0.9:8000").expect("there"), &before), "its connections stay");
    assert!(bench.gateway.serving().models().find("n").is_some(), "the config stays");
    assert_eq!(bench.live.current().1, more, "and its text");
}

#[test]
fn the_metric_says_whether_a_restart_could_begin_with_the_file() {
    let bench = Bench::new("metric", &named("one"));
    let is_good = || bench.metric("penstock_config_last_reload_ok") == "1";
    let (look, ops) = (|| bench.live.reload_changed(&By::new("file")), By::new("ops"));
    for stale in [
        bench.live.apply(&named("two"), &ops, Some(99)),
        bench.live.rollback(1, &ops, Some(99)),
        bench.live.reload_expected(&ops, Some(99)),
    ] {
        assert!(matches!(stale, Err(ApplyError::Conflict { .. })), "{stale:?}");
    }
    assert!(is_good(), "one of two admins was faster");
    assert_eq!(bench.metric("penstock_config_reloads_total{outcome=\"refused\"}"), "0");
    bench.live.apply("nonsense = 1", &ops, None).expect_err("no config");
    assert!(is_good(), "no process begins with an admin's text");

    fs::write(&bench.file, "nonsense = 1").expect("written");
    look();
    assert!(!is_good());
    bench.live.apply(&named("two"), &ops, None).expect("applied");
    look();
    assert!(!is_good(), "the file is as bad as before");
    fs::write(&bench.file, named("three")).expect("written");
    look();
    assert!(is_good());

    for by_signal in [true, false] {
        fs::remove_file(&bench.file).expect("removed");
        match by_signal {
            true => drop(bench.live.reload(&By::new("signal")).expect_err("there is no file")),
            false => look(),
        }
        assert!(!is_good());
        fs::write(&bench.file, named("three")).expect("written");
        look();
        assert!(is_good(), "it is back as it was");
    }
    fs::write(&bench.file, "").expect("written");
    look();
    assert!(!is_good(), "a process that begins with it would have every default");
    fs::write(&bench.file, named("three")).expect("written");
    look();
    assert!(is_good());

    // What an admin applies is the file's text, which was refused for a file that it names.
    let key = bench.file.with_file_name("key");
    let text = text(&format!("key_file = {key:?}\n"));
    fs::write(&bench.file, &text).expect("written");
    look();
    assert!(!is_good());
    fs::write(&key, "secret").expect("written");
    assert!(bench.live.apply(&text, &ops, None).expect("applied").persisted && is_good());

    let next = Bench::begun(bench.file.clone(), &named("two"), Some("nonsense = 1".into()), None);
    assert_eq!(next.metric("penstock_config_last_reload_ok"), "0", "an upgrade mends no file");
}

#[test]
fn the_config_that_an_upgrade_hands_over_changes_by_the_file_alone() {
    let bench = Bench::new("withheld", &named("one"));
    let ops = By::new("ops");
    bench.live.apply(&named("two"), &ops, None).expect("applied");
    let before = (bench.live.current(), bench.live.history());
    let (withheld, beside) = bench.live.withhold_changes();
    assert_eq!(beside, Some((named("two"), named("one"))));
    let edited: Result<Applied, ApplyError> = bench.live.edit(&ops, |_| Ok(named("three")));
    for late in [
        bench.live.apply(&named("three"), &ops, None),
        bench.live.rollback(1, &ops, None),
        bench.live.reload(&By::new("signal")),
        edited,
    ] {
        assert!(matches!(late, Err(ApplyError::Upgrading)), "{late:?}");
    }
    bench.live.validate(&named("three")).expect("it changes nothing");
    assert_eq!((bench.live.current(), bench.live.history()), before);
    assert_eq!(bench.metric("penstock_config_last_reload_ok"), "1");
    // The next process looks at the file when it serves.
    fs::write(&bench.file, named("four")).expect("written");
    bench.live.reload_changed(&By::new("file"));
    assert_eq!(bench.names()[0], "four");
    drop(withheld);
    bench.live.apply(&named("five"), &ops, None).expect("the upgrade has failed");
}

#[test]
fn a_process_that_another_has_taken_over_from_follows_the_file_and_keeps_no_history() {
    let bench = Bench::new("leaving", &named("one"));
    let before = bench.live.history();
    bench.gateway.leave();
    // A key that the new version knows.
    fs::write(&bench.file, "nonsense = 1").expect("written");
    (0..2).for_each(|_| bench.live.reload_changed(&By::new("file")));
    assert_eq!((bench.live.history(), bench.names()[0].as_str()), (before.clone(), "one"));
    assert_eq!(bench.metric("penstock_config_reloads_total{outcome=\"refused\"}"), "0");
    fs::write(&bench.file, named("two")).expect("written");
    bench.live.reload_changed(&By::new("file"));
    assert_eq!((bench.live.history(), bench.names()[0].as_str()), (before, "two"), "a key may have been revoked");
    assert!(matches!(bench.live.apply(&named("three"), &By::new("ops"), None), Err(ApplyError::Upgrading)));
}
