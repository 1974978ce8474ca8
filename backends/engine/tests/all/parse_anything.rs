//! Arbitrary bytes in a checkpoint's files: opening returns, and our header parser agrees with the format's own
//! library.

use crate::{common, encoders};

use common::load;
use common::weights::{Files, Golden, adapter_files, tensor, with_header};
use penstock_engine::Forward;
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::checkpoint::safetensors::read_header;
use penstock_kernels::{AdapterSlot, Pool, Span, StepBatch};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::json;

/// One damage to the bytes of a file.
#[derive(Clone, Debug)]
enum Damage {
    Flip(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Remove(prop::sample::Index, usize),
    Insert(prop::sample::Index, Vec<u8>),
    /// Replaces the number that begins at or after a place.
    Number(prop::sample::Index, String),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<prop::sample::Index>;
    let numbers = prop_oneof![
        Just("0".to_owned()),
        Just("-1".to_owned()),
        Just("1e400".to_owned()),
        Just("null".to_owned()),
        Just(u64::MAX.to_string()),
        Just((1u64 << 32).to_string()),
        Just("[[]]".to_owned()),
        any::<u32>().prop_map(|n| n.to_string()),
        any::<f64>().prop_map(|n| n.to_string()),
    ];
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(i, byte)| Damage::Flip(i, byte)),
        at().prop_map(Damage::Cut),
        (at(), 1..40usize).prop_map(|(i, n)| Damage::Remove(i, n)),
        (at(), prop::collection::vec(any::<u8>(), 1..20)).prop_map(|(i, bytes)| Damage::Insert(i, bytes)),
        (at(), numbers).prop_map(|(i, number)| Damage::Number(i, number)),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.is_empty() {
        return;
    }
    match damage {
        Damage::Flip(i, byte) => *i.get_mut(bytes) ^= byte,
        Damage::Cut(i) => bytes.truncate(i.index(bytes.len())),
        Damage::Remove(i, count) => {
            let at = i.index(bytes.len());
            bytes.drain(at..(at + count).min(bytes.len()));
        }
        Damage::Insert(i, new) => {
            let at = i.index(bytes.len());
            bytes.splice(at..at, new.iter().copied());
        }
        Damage::Number(i, number) => {
            let from = i.index(bytes.len());
            let Some(start) = bytes[from..].iter().position(u8::is_ascii_digit).map(|n| from + n) else { return };
            let length = bytes[start..].iter().take_while(|b| b.is_ascii_digit()).count();
            bytes.splice(start..start + length, number.bytes());
        }
    }
}

/// Damages the header inside of its frame, so that the length stays true and the damage reaches the parser behind it.
fn apply_to_header(file: &mut Vec<u8>, damage: &Damage) {
    let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    let mut header = file[8..8 + length].to_vec();
    let data = file.split_off(8 + length);
    apply(&mut header, damage);
    *file = with_header(&header);
    file.extend(data);
}

/// Opens a checkpoint, and if that works uses everything it promises.
fn open(files: Files) {
    let Ok(checkpoint) = Checkpoint::from_buffers(files) else { return };
    assert!(checkpoint.weights_bytes() > 0);
    // A damaged value may claim a long context; the page budget alone decides what is allocated.
    drop(load(&checkpoint, &common::reference, 2, 4));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_never_panic(
        shards in 1..3usize,
        which in any::<prop::sample::Index>(),
        damages in prop::collection::vec((damage(), any::<bool>()), 1..4),
    ) {
        let mut files = Golden::tiny(shards).files();
        let (name, bytes) = &mut files[which.index(if shards == 1 { 2 } else { shards + 2 })];
        for (damage, framed) in &damages {
            let framed = *framed && name.ends_with(".safetensors") && bytes.len() > 8;
            let whole = || u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) <= bytes.len() as u64 - 8;
            if framed && whole() { apply_to_header(bytes.to_mut(), damage) } else { apply(bytes.to_mut(), damage) }
        }
        open(files);
    }

    #[test]
    fn damaged_quantized_files_never_panic(
        form in 0..4usize,
        of_config in any::<bool>(),
        damages in prop::collection::vec((damage(), any::<bool>()), 1..4),
    ) {
        let mut files = Golden::tiny_quantized(form).files();
        let (_, bytes) = &mut files[usize::from(!of_config)];
        for (damage, framed) in &damages {
            let framed = *framed && !of_config && bytes.len() > 8;
            let whole = || u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) <= bytes.len() as u64 - 8;
            if framed && whole() { apply_to_header(bytes.to_mut(), damage) } else { apply(bytes.to_mut(), damage) }
        }
        open(files);
    }

    #[test]
    fn damaged_encoders_never_panic(
        case in prop::sample::select(vec!["bert-rank-plain", "modern-rank-mean", "mpnet-rank"]),
        of_config in prop::bool::weighted(0.7),
        damages in prop::collection::vec(damage(), 1..4),
    ) {
        let mut files = encoders::named(case).files();
        let bytes = files[usize::from(!of_config)].1.to_mut();
        for damage in &damages {
            if of_config { apply(bytes, damage) } else { apply_to_header(bytes, damage) }
        }
        let Ok(checkpoint) = Checkpoint::from_buffers(files) else { return Ok(()) };
        let mut model = load(&checkpoint, &common::reference, 2, 4);
        let spans = [Span { rows: 0..3, context: 3, block_table: &[1], adapter: None }];
        let batch = StepBatch { tokens: &[5, 6, 7], spans: &spans, sampled: &[0], pools: &[Pool::MEAN], ..StepBatch::default() };
        let mut out = Vec::new();
        // Fewer tokens or positions than the step has are the one thing that a damage may leave.
        if model.states(&batch, None, &mut out, false).is_ok() {
            prop_assert_eq!(out.len(), 1);
        }
    }

    #[test]
    fn damaged_adapters_never_panic(
        of_config in any::<bool>(),
        damages in prop::collection::vec((damage(), any::<bool>()), 1..4),
    ) {
        let (golden, settings) = (Golden::tiny(1), json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4.5, "bias": "none",
            "use_rslora": true, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"^model.layers.0.mlp.up_proj": 8}}));
        let matrix = |part: &str, shape| tensor(1, "f16", &format!("base_model.model.model.layers.0.{part}.weight"), shape);
        let tensors = [matrix("self_attn.q_proj.lora_A", &[2, 4]), matrix("self_attn.q_proj.lora_B", &[4, 2])];
        let mut files = adapter_files(&settings, &tensors);
        prop_assert!(Adapter::from_buffers(files.clone(), golden.checkpoint().config()).is_ok());
        let bytes = files[usize::from(!of_config)].1.to_mut();
        for (damage, framed) in &damages {
            let whole = |bytes: &[u8]| {
                bytes.len() > 8 && u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) <= bytes.len() as u64 - 8
            };
            if *framed && !of_config && whole(bytes) { apply_to_header(bytes, damage) } else { apply(bytes, damage) }
        }
        let checkpoint = golden.checkpoint();
        let Ok(adapter) = Adapter::from_buffers(files, checkpoint.config()) else { return Ok(()) };
        // Rank, factors and values may be damaged, shapes are not.
        load(&checkpoint, &common::reference, 2, 4).add_adapter(AdapterSlot(0), &adapter).expect("it fits the model");
    }

    #[test]
    fn headers_are_judged_as_by_the_safetensors_library(
        tensors in prop::collection::vec(("[a-c]{1,2}", prop::collection::vec(0..4u64, 0..3), 0..3usize), 0..5),
        shift in prop::option::weighted(0.3, (any::<prop::sample::Index>(), -2..3i64, -2..3i64)),
        spare in -1..2i64,
    ) {
        let mut at = 0;
        let mut entries = Vec::new();
        for (name, shape, dtype) in tensors {
            let (dtype, size) = [("BF16", 2), ("F16", 2), ("F32", 4)][dtype];
            let end = at + shape.iter().product::<u64>() * size;
            entries.push((name, dtype, shape, at as i64, end as i64));
            at = end;
        }
        if let Some((index, begin, end)) = shift && !entries.is_empty() {
            let entry = index.get_mut(&mut entries);
            (entry.3, entry.4) = (entry.3 + begin, entry.4 + end);
        }
        let object = |(name, dtype, shape, begin, end): &(String, &str, Vec<u64>, i64, i64)| {
            format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{begin},{end}]}}")
        };
        let json: Vec<String> = entries.iter().map(object).collect();
        let mut file = with_header(format!("{{{}}}", json.join(",")).as_bytes());
        file.extend(vec![0; (at as i64 + spare).max(0) as usize]);
        let ours = read_header("f", &file);
        let mut names: Vec<&String> = entries.iter().map(|entry| &entry.0).collect();
        names.sort_unstable();
        let twice = names.windows(2).any(|pair| pair[0] == pair[1]);
        match SafeTensors::deserialize(&file) {
            // A duplicate name is refused here; the library takes the last.
            _ if twice => prop_assert!(ours.is_err()),
            Err(error) => prop_assert!(ours.is_err(), "the library says {error}"),
            Ok(theirs) => {
                let ours = ours.map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert_eq!(ours.len(), theirs.len());
                for entry in ours {
                    let view = theirs.tensor(&entry.name).expect("the same names");
                    prop_assert_eq!(&file[entry.range], view.data());
                    prop_assert_eq!(entry.shape, view.shape());
                }
            }
        }
    }

    #[test]
    fn any_bytes_are_a_header_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read_header("f", &bytes);
        let _ = read_header("f", &with_header(&bytes));
    }
}

#[test]
fn the_small_quantized_ones_open() {
    for form in 0..4 {
        open(Golden::tiny_quantized(form).files());
        let checkpoint = Golden::tiny_quantized(form).checkpoint();
        assert!(checkpoint.config().quantization.is_some() && checkpoint.ignored().is_empty());
    }
}
