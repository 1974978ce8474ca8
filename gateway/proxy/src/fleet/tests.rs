use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use penstock_config::{DeviceChoice, Overrides};
use penstock_pool::Steer;

use super::*;
use crate::reload::Source;

/// Folder with a model of its own, deleted at the end.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("penstock-fleet-{name}-{}", std::process::id()));
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
    pub(crate) fn config(&self) -> Snapshot {
        self.pool(&format!("connect = [\"unix:{}/w.sock\"]", self.0.display()))
    }

    /// Config of a pool with further keys.
    fn pool(&self, keys: &str) -> Snapshot {
        let folder = self.0.display();
        let text = format!(
            "[server]\nstate_dir = \"{folder}/state\"\n[[pools]]\nid = \"own\"\nmodel = \"{folder}/model\"\n{keys}\n"
        );
        Source::new(None, Overrides::default()).load(&text).expect("valid")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn command() -> WorkerCommand {
    WorkerCommand {
        program: "/bin/false".into(),
        identity: String::new(),
        args: |_| Vec::new(),
        inspect: |_| Err("no model can be loaded in this test".into()),
        is_on_gpu: |_| Ok(false),
        weights_key: |_, _| Ok(None),
        layout: CopyLayout { key: |_| None, fill: |_, _, _, _, _| Ok(false) },
        demo: &[],
    }
}

#[test]
fn files_that_were_replaced_at_their_path_make_another_pool() {
    let scratch = Scratch::new("files");
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

#[test]
fn new_workers_of_a_changed_pool_start_beside_the_old_ones_only_where_both_have_room_on_the_gpu() {
    let scratch = Scratch::new("gpu");
    // More than any host has: memory of the host says nothing about a GPU.
    let gpu = || WorkerCommand {
        args: |pool| vec![format!("{:?} {} {:?}", pool.device, pool.sequences_max, pool.gpu_memory_share()).into()],
        inspect: |_| Ok(u64::MAX / 4),
        is_on_gpu: |pool| Ok(pool.device == DeviceChoice::Cuda),
        ..command()
    };
    let check = |before: &str, after: &str, wanted: Option<&str>| {
        let fleet = Fleet::start(&scratch.pool(before), gpu()).expect("started");
        let planned = fleet.plan(&scratch.pool(after)).map(|_| ()).map_err(|error| error.to_string());
        fleet.stop(Leave::Exit, Duration::ZERO);
        match (planned, wanted) {
            (Ok(()), None) => {}
            (Err(error), Some(words)) => {
                assert!(
                    error.contains(words) && error.contains("take the pool out first, or restart"),
                    "{after}: {error}"
                );
            }
            (planned, _) => panic!("{before} -> {after}: {planned:?}"),
        }
    };
    let (cuda, half) = ("device = \"cuda\"", "device = \"cuda\"\ngpu_memory_share = 0.5");
    let changed = |keys: &str| format!("{keys}\nsequences_max = 3");
    check(cuda, &changed(cuda), Some("not both have a gpu_memory_share"));
    check(half, &changed(cuda), Some("not both have a gpu_memory_share"));
    check(half, &changed(half), None);
    check(half, &changed("device = \"cuda\"\ngpu_memory_share = 0.6"), Some("is 1.1 together"));
    check(&format!("{half}\nworkers = 2"), &changed(half), Some("is 1.5 together"));
    check(cuda, &format!("{cuda}\nqueue_max = 9"), None);
    check("device = \"cpu\"", cuda, None);
    check(cuda, "device = \"cpu\"", Some("GB are free"));
}

/// Lines that the stand-ins of workers wrote, of the pool of that id: their arguments.
fn starts(log: &Path, pool: &str) -> Vec<String> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let socket = format!("/{pool}-0-");
    text.lines().filter(|line| line.contains(&socket)).map(str::to_owned).collect()
}

/// Waits for what comes within seconds.
fn soon(what: &str, mut is_there: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_there() {
        assert!(Instant::now() < until, "{what}");
        std::thread::park_timeout(LOOK);
    }
}

#[test]
fn workers_wait_for_the_gpu_of_a_pool_that_ends_and_take_the_cpu_where_none_does() {
    let scratch = Scratch::new("leavers");
    let (log, worker) = (scratch.0.join("starts"), scratch.0.join("worker.sh"));
    // Workers of the first pool stay; those of the others end at once, as ones without room do.
    let script =
        format!("#!/bin/sh\necho \"$*\" >> {}\ncase \"$*\" in */own-0-*) exec sleep 600;; esac\n", log.display());
    fs::write(&worker, script).expect("written");
    fs::set_permissions(&worker, fs::Permissions::from_mode(0o700)).expect("it is ours");
    let command = WorkerCommand { program: worker, inspect: |_| Ok(1), is_on_gpu: |_| Ok(true), ..command() };
    let waits = |line: &String| line.contains("--keep-to-gpu");

    let own = scratch.pool("");
    let named = |id: &str| {
        let pools = vec![PoolConfig { id: id.into(), ..own.pools[0].clone() }];
        Snapshot { pools, ..own.clone() }
    };
    let fleet = Fleet::start(&own, command).expect("started");
    soon("the first pool's worker runs", || {
        fleet.pools().iter().all(|(_, pool)| pool.status().workers.iter().any(penstock_pool::WorkerStatus::is_local))
    });
    assert_eq!(starts(&log, "own").iter().filter(|line| waits(line)).count(), 0, "{:?}", starts(&log, "own"));

    // A request that the first pool still answers.
    let open = fleet.upstreams();
    let plan = fleet.plan(&named("other")).expect("it is no reason to refuse the config");
    fleet.carry_out(plan).expect("started");
    soon("it is started again", || starts(&log, "other").len() > 1);
    assert!(starts(&log, "other").iter().all(waits), "from the first start on: {:?}", starts(&log, "other"));
    drop(open);
    soon("none is about to end", || starts(&log, "other").iter().any(|line| !waits(line)));
    assert!(lock(&fleet.state).to_end().next().is_none());
    fleet.stop(Leave::Exit, Duration::ZERO);
}

#[test]
fn pools_of_a_process_that_another_has_taken_over_from_leave_their_workers_to_it() {
    let scratch = Scratch::new("settled");
    let config = |queue_max: u32, more: &str| {
        let keys = "replicas = \"follow\"\nreplica_command = [\"/bin/false\", \"{action}\"]";
        let socket = scratch.0.join("w.sock");
        scratch.pool(&format!("connect = [\"unix:{}\"]\n{keys}\nqueue_max = {queue_max}\n{more}", socket.display()))
    };
    let fleet = Fleet::start(&config(8, ""), command()).expect("started");
    let changed = |config: &Snapshot| fleet.carry_out(fleet.plan(config).expect("it can be served")).expect("started");
    let settled = || fleet.pools().iter().map(|(_, pool)| pool.is_settled()).collect::<Vec<_>>();
    assert_eq!(settled(), [false]);
    changed(&config(9, ""));
    assert_eq!(settled(), [true, false], "the one that takes over decides");
    fleet.settle();
    assert_eq!(settled(), [true, true]);
    changed(&config(10, ""));
    assert_eq!(settled(), [true, true], "a changed pool");
    changed(&config(10, "adapters = { a = \"/models/a\" }"));
    assert_eq!(settled(), [true, true], "other adapters");
    let mut more = config(10, "");
    more.pools.push(PoolConfig { id: "more".into(), ..more.pools[0].clone() });
    changed(&more);
    assert_eq!(settled(), [true; 3], "an added pool");
    fleet.stop(Leave::Exit, Duration::ZERO);
}

#[test]
fn what_an_operator_holds_stays_held_in_the_changed_pool() {
    let scratch = Scratch::new("held");
    let config = |queue_max: u32| {
        let socket = scratch.0.join("w.sock");
        scratch.pool(&format!("connect = [\"unix:{}\"]\nqueue_max = {queue_max}", socket.display()))
    };
    let fleet = Fleet::start(&config(8), command()).expect("started");
    let worker = fleet.pools()[0].1.status().workers[0].name.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let steer = |order| runtime.block_on(fleet.pools()[0].1.steer(&worker, order)).expect("an order");
    let held = || fleet.pools().iter().map(|(_, pool)| pool.holds().names()).collect::<Vec<_>>();
    steer(Steer::Hold);
    let plan = fleet.plan(&config(9)).expect("it can be served");
    fleet.carry_out(plan).expect("started");
    assert_eq!(held(), vec![vec![worker.clone()]; 2], "the old pool, and the one that takes over");
    assert_eq!(fleet.held(), HeldWorkers::from([("own".to_owned(), vec![worker.clone()])]));
    steer(Steer::Release);
    assert_eq!((held(), fleet.held()), (vec![Vec::new(); 2], HeldWorkers::new()));
    fleet.stop(Leave::Exit, Duration::ZERO);
}
