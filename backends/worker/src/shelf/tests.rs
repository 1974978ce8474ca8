//! Orders against what an engine with the demo model then holds.

use super::*;
use crate::model::build;
use crate::options::ModelOptions;
use penstock_proto::frames::{Cancel, ChoiceStart, Generate, Sampling};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

/// Folder of adapters, removed at its end.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("penstock-shelf-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }

    /// PEFT folder of an adapter of one matrix of the demo model; equal seeds give equal content.
    fn adapter(&self, name: &str, seed: u8) -> String {
        let folder = self.0.join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let config = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#;
        std::fs::write(folder.join("adapter_config.json"), config).expect("written");
        let matrix = "base_model.model.model.layers.0.self_attn.o_proj.lora_";
        // The output projection of the demo model: [256, 256].
        let header = format!(
            r#"{{"{matrix}A.weight":{{"dtype":"F32","shape":[1,256],"data_offsets":[0,1024]}},"{matrix}B.weight":{{"dtype":"F32","shape":[256,1],"data_offsets":[1024,2048]}}}}"#
        );
        let values = (0..512_u32).flat_map(|at| ((f32::from(seed) + at as f32) / 600.0).to_le_bytes());
        let bytes: Vec<u8> =
            (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(values).collect();
        std::fs::write(folder.join("adapter_model.safetensors"), bytes).expect("written");
        folder.display().to_string()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A shelf with its engine; folders are read when the test says so.
struct Bench {
    engine: Engine,
    shelf: Shelf,
    read: Read,
    asked: mpsc::Receiver<OrderedAdapter>,
    requests: u64,
}

impl Bench {
    fn new() -> Self {
        let options = ModelOptions {
            threads: 1,
            kv_bytes_max: 8 << 20,
            adapter_orders: true,
            device: crate::DeviceChoice::Cpu,
            ..Default::default()
        };
        let (engine, mut info) = build(options)(&mut |_| {}).expect("the demo model loads");
        let (sender, asked) = mpsc::channel();
        let read: Read = Box::new(move |wanted, _| sender.send(wanted).expect("the test listens"));
        Self { engine, shelf: info.shelf.take().expect("it takes orders"), read, asked, requests: 0 }
    }

    fn order(&mut self, adapters: &[OrderedAdapter]) {
        self.shelf.order(AdapterOrder { adapters: adapters.to_vec() }, &mut self.engine);
    }

    /// Delivers one folder that was to be read.
    fn deliver(&mut self) -> bool {
        let Ok(wanted) = self.asked.try_recv() else { return false };
        let opened = open(&wanted, &self.shelf.config);
        self.shelf.opened(wanted, opened, &mut self.engine);
        true
    }

    fn go_on(&mut self) {
        self.shelf.go_on(&mut self.engine, &self.read);
    }

    /// Goes on until nothing is left to do.
    fn settle(&mut self) {
        loop {
            self.go_on();
            if !self.deliver() && !self.shelf.is_loading() {
                return;
            }
        }
    }

    /// Begins a request with an adapter; returns its number.
    fn ask(&mut self, id: AdapterId) -> u64 {
        self.requests += 1;
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 500,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Default::default()
        };
        let name = id.to_bytes().to_vec();
        self.engine.submit(Generate {
            request: self.requests,
            prompt: vec![4088, 5, 6],
            choices: vec![ChoiceStart::default()],
            sampling: Some(sampling),
            salt: name.clone(),
            adapter: name,
            ..Default::default()
        });
        self.engine.step(&|| Duration::ZERO);
        self.requests
    }

    fn end(&mut self, request: u64) {
        self.engine.cancel(&Cancel { request, choices: Vec::new() });
        self.engine.step(&|| Duration::ZERO);
    }

    fn loaded(&self) -> Vec<(String, String)> {
        self.shelf.report().loaded.into_iter().map(|adapter| (adapter.name, adapter.key)).collect()
    }

    fn whys(&self) -> Vec<(String, String)> {
        self.shelf.report().pending.into_iter().map(|adapter| (adapter.name, adapter.why)).collect()
    }
}

fn wanted(name: &str, path: &str, key: &str) -> OrderedAdapter {
    OrderedAdapter { name: name.into(), path: path.into(), key: key.into() }
}

fn pair(name: &str, key: &str) -> (String, String) {
    (name.into(), key.into())
}

#[test]
fn an_order_is_carried_out_and_a_second_one_reads_only_what_is_new() {
    let place = Place::new("orders");
    let (a, b) = (wanted("a", &place.adapter("a", 1), "1"), wanted("b", &place.adapter("b", 2), "1"));
    let mut bench = Bench::new();
    bench.order(std::slice::from_ref(&a));
    assert_eq!((bench.loaded(), bench.whys()), (vec![], vec![pair("a", "")]), "it comes");
    bench.settle();
    assert_eq!((bench.loaded(), bench.whys()), (vec![pair("a", "1")], vec![]));
    bench.order(&[a, b.clone()]);
    bench.go_on();
    assert_eq!(bench.asked.try_recv().expect("b is read"), b);
    assert!(bench.asked.try_recv().is_err(), "a is not read again");
    assert_eq!(bench.loaded(), [pair("a", "1")], "a is served meanwhile");
    let opened = open(&b, &bench.shelf.config);
    bench.shelf.opened(b.clone(), opened, &mut bench.engine);
    bench.settle();
    assert_eq!(bench.loaded(), [pair("a", "1"), pair("b", "1")]);
    bench.order(&[b]);
    bench.settle();
    assert_eq!((bench.loaded(), bench.engine.adapters().len()), (vec![pair("b", "1")], 1));
}

#[test]
fn other_content_under_a_name_stands_beside_the_old_until_the_order_says_otherwise() {
    let place = Place::new("other");
    let (old, new) = (wanted("a", &place.adapter("a", 1), "1"), wanted("a", &place.adapter("a2", 2), "2"));
    let mut bench = Bench::new();
    bench.order(std::slice::from_ref(&old));
    bench.settle();
    let first = bench.engine.adapters()[0];
    let request = bench.ask(first);
    bench.order(&[new.clone(), old]);
    bench.settle();
    assert_eq!(bench.loaded(), [pair("a", "2"), pair("a", "1")]);
    bench.order(&[new]);
    bench.settle();
    assert_eq!(bench.loaded(), [pair("a", "2")]);
    assert!(bench.engine.holds_adapter(first) && !bench.engine.adapters().contains(&first), "its request goes on");
    assert_eq!(bench.shelf.room.held.len(), 2);
    bench.end(request);
    bench.settle();
    assert!(!bench.engine.holds_adapter(first));
    assert_eq!(bench.shelf.room.held.len(), 1);
}

#[test]
fn what_cannot_be_loaded_is_reported_and_tried_again_with_the_next_order() {
    let place = Place::new("damaged");
    let (good, path) = (wanted("good", &place.adapter("good", 1), "1"), place.adapter("bad", 2));
    let weights = PathBuf::from(&path).join("adapter_model.safetensors");
    let bytes = std::fs::read(&weights).expect("read");
    std::fs::write(&weights, &bytes[..100]).expect("written");
    let (bad, relative) = (wanted("bad", &path, "1"), wanted("relative", "bad", "1"));
    let mut bench = Bench::new();
    bench.order(&[bad.clone(), relative, good.clone()]);
    bench.settle();
    assert_eq!(bench.loaded(), [pair("good", "1")]);
    let whys = bench.whys();
    assert!(whys[0].0 == "bad" && whys[0].1.contains(&path) && whys[0].1.contains("adapter_model"), "{whys:?}");
    assert!(whys[1].1.contains("absolute"), "{whys:?}");
    std::fs::write(&weights, &bytes).expect("written");
    bench.settle();
    assert_eq!(bench.loaded(), [pair("good", "1")], "not by itself");
    bench.order(&[bad, good]);
    bench.settle();
    assert_eq!(bench.loaded(), [pair("bad", "1"), pair("good", "1")]);
}

#[test]
fn an_adapter_that_the_memory_plan_has_no_room_for_is_refused_with_the_numbers() {
    let place = Place::new("memory");
    let (a, b) = (wanted("a", &place.adapter("a", 1), "1"), wanted("b", &place.adapter("b", 2), "1"));
    let mut bench = Bench::new();
    // Both matrices take 4096 bytes, with ranks padded to four; the products of a row four values.
    let products = 4 * 4 * bench.shelf.room.rows;
    bench.shelf.room.bytes = 4096 + products;
    bench.order(&[a, b.clone()]);
    bench.settle();
    assert_eq!(bench.loaded(), [pair("a", "1")]);
    let why = &bench.whys()[0].1;
    let (both, room) = (8192 + products, 4096 + products);
    assert!(
        why.contains("takes 4096 bytes") && why.contains(&both.to_string()) && why.contains(&room.to_string()),
        "{why}"
    );
    // With the first one's request still open there is no room yet, but there will be.
    let request = bench.ask(bench.engine.adapters()[0]);
    bench.order(&[b]);
    bench.settle();
    assert!(
        bench.whys()[0].1.contains("once requests that still use a removed adapter have ended"),
        "{:?}",
        bench.whys()
    );
    bench.end(request);
    bench.settle();
    assert_eq!(bench.loaded(), [pair("b", "1")]);
}

#[test]
fn an_order_of_too_many_is_cut() {
    let mut bench = Bench::new();
    let many: Vec<_> = (0..100).map(|at| wanted(&format!("a{at}"), "/nonexistent", "1")).collect();
    bench.order(&many);
    bench.settle();
    assert_eq!(bench.whys().len(), ADAPTERS_MAX);
}

#[derive(Clone, Debug)]
enum Move {
    /// Order of these of the adapters.
    Order(Vec<usize>),
    GoOn,
    Deliver,
    Ask(usize),
    End(usize),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        3 => proptest::sample::subsequence((0..6).collect::<Vec<_>>(), 0..=6).prop_shuffle().prop_map(Move::Order),
        6 => Just(Move::GoOn),
        3 => Just(Move::Deliver),
        2 => (0..4usize).prop_map(Move::Ask),
        2 => (0..8usize).prop_map(Move::End),
    ];
    proptest::collection::vec(one, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happened_before_the_last_order_is_what_is_held(moves in moves()) {
        let place = Place::new("any");
        // Two of one content, one that cannot be read, one of the name of another.
        let all = [
            wanted("a", &place.adapter("a", 1), "1"),
            wanted("b", &place.adapter("b", 2), "1"),
            wanted("c", &place.adapter("c", 2), "1"),
            wanted("d", &place.adapter("d", 3), "1"),
            wanted("bad", "/nonexistent", "1"),
            wanted("a", &place.adapter("a2", 4), "2"),
        ];
        let mut bench = Bench::new();
        let (mut last, mut open_requests) = (Vec::new(), Vec::new());
        for one in moves {
            match one {
                Move::Order(which) => {
                    last = which.iter().map(|at| all[*at].clone()).collect();
                    bench.order(&last);
                }
                Move::GoOn => bench.go_on(),
                Move::Deliver => _ = bench.deliver(),
                Move::Ask(at) => {
                    if let Some(id) = bench.engine.adapters().get(at) {
                        open_requests.push(bench.ask(*id));
                    }
                }
                Move::End(at) if at < open_requests.len() => {
                    let request = open_requests.swap_remove(at);
                    bench.end(request);
                }
                Move::End(_) => {}
            }
            // What is told can be asked for.
            let engine: BTreeSet<AdapterId> = bench.engine.adapters().into_iter().collect();
            for adapter in bench.shelf.report().loaded {
                prop_assert!(engine.contains(&AdapterId::from_bytes(&adapter.id).expect("an id")));
            }
            prop_assert!(bench.shelf.room.held.keys().all(|id| bench.engine.holds_adapter(*id)));
        }
        bench.settle();
        let good: Vec<(String, String)> =
            last.iter().filter(|one| one.name != "bad").map(|one| (one.name.clone(), one.key.clone())).collect();
        prop_assert_eq!(bench.loaded(), good);
        prop_assert_eq!(bench.whys().len(), last.iter().filter(|one| one.name == "bad").count());
        open_requests.into_iter().for_each(|request| bench.end(request));
        bench.settle();
        let told: BTreeSet<Vec<u8>> = bench.shelf.report().loaded.into_iter().map(|adapter| adapter.id).collect();
        let held: BTreeSet<Vec<u8>> = bench.engine.adapters().iter().map(|id| id.to_bytes().to_vec()).collect();
        prop_assert_eq!(&told, &held);
        let counted: BTreeSet<Vec<u8>> = bench.shelf.room.held.keys().map(|id| id.to_bytes().to_vec()).collect();
        prop_assert_eq!(&counted, &held);
    }
}
