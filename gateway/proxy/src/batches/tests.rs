//! Tests of batches against an upstream whose behavior each line's body chooses.

mod bed;

use bytes::Bytes;
use penstock_store::{
    Entry, EntryFilter, FileId, NewBatch, OpenEntry, Order, Page, ResponseChange, ResponseRecord, ResponseRoom,
    ResponseStatus, Tenant,
};
use penstock_telemetry::Gauge;
use penstock_types::Surface;

use super::*;
use crate::batch_text::{MESSAGES, surface_of};
use crate::event_log::Log;
use bed::*;

#[tokio::test]
async fn answers_and_errors_go_to_their_files() {
    let bed = Bed::new(memory(), "");
    let id = bed.batch(&nobody(), &file(&["ok", "bad", "flaky", "panic", "ok"]), tomorrow()).await;
    let batch = bed.ended(&nobody(), &id).await;
    assert_eq!(batch.status, BatchStatus::Completed);
    assert_eq!((batch.counts.total, batch.counts.completed, batch.counts.failed), (5, 3, 2));
    let output = bed.lines(&nobody(), batch.output.as_ref()).await;
    let ids: Vec<_> =
        output.iter().map(|line| line.split("custom_id\":\"").nth(1).expect("an id")[..2].to_owned()).collect();
    assert_eq!(ids, ["c0", "c2", "c4"], "in the order of the file");
    assert!(output[0].contains(r#""response":{"status_code":200,"request_id":"req_"#), "{output:?}");
    assert!(output[0].ends_with(r#""body":{"model":"m","do":"ok","at":0}},"error":null}"#), "{output:?}");
    let errors = bed.lines(&nobody(), batch.errors.as_ref()).await;
    assert!(errors[0].contains(r#""status_code":400"#) && errors[0].contains("It is bad."), "{errors:?}");
    assert!(errors[1].contains(r#""status_code":500"#) && !errors[1].contains("as asked"), "{errors:?}");
    assert_eq!(bed.script.opened.load(Ordering::SeqCst), 6, "one line was tried twice");
}

#[tokio::test]
async fn a_file_that_is_no_batch_fails_with_its_lines() {
    let bed = Bed::new(memory(), "[batches]\nlines_max = 3\n");
    for (text, code, line) in [
        (file(&["ok", "ok"]) + "{\n", "invalid_json_line", "\"line\":3"),
        (file(&["ok"]) + &file(&["ok"]), "duplicate_custom_id", "\"line\":2"),
        (file(&["ok", "ok", "ok", "ok"]), "too_many_requests", "\"line\":4"),
        ("\n\n".into(), "empty_file", "\"line\":null"),
    ] {
        let id = bed.batch(&nobody(), &text, tomorrow()).await;
        let batch = bed.ended(&nobody(), &id).await;
        assert_eq!(batch.status, BatchStatus::Failed);
        assert!(batch.faults.contains(code) && batch.faults.contains(line), "{}", batch.faults);
    }
    assert_eq!(bed.script.opened.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_cancelled_batch_keeps_what_it_has() {
    let bed = Bed::new(memory(), "[batches]\nconcurrency = 2\n");
    let id = bed.batch(&nobody(), &file(&["ok", "hang", "hang", "ok"]), tomorrow()).await;
    bed.until(&nobody(), &id, |batch| batch.counts.completed == 1).await;
    bed.store.cancel_batch(&nobody(), &id, unix_seconds()).await.expect("cancelled");
    bed.gateway.keeper().expect("a store").wake.notify_one();
    let batch = bed.ended(&nobody(), &id).await;
    assert_eq!((batch.status, batch.counts.completed, batch.counts.failed), (BatchStatus::Cancelled, 1, 3));
    assert_eq!(bed.lines(&nobody(), batch.output.as_ref()).await.len(), 1);
    let errors = bed.lines(&nobody(), batch.errors.as_ref()).await;
    assert!(errors.len() == 3 && errors.iter().all(|line| line.contains("batch_cancelled")), "{errors:?}");
}

/// After a failover to a server that lacks the cancellation, the store says again that the batch is in progress.
#[tokio::test]
async fn a_batch_whose_cancellation_is_lost_goes_on() {
    let mut bed = Bed::new(memory(), "");
    bed.runner.abort();
    let id = bed.batch(&nobody(), &file(&["ok"]), tomorrow()).await;
    let bench = Bench::new(bed.gateway.clone());
    let open = bed.store.open_batches(1).await.expect("read").remove(0);
    let (_cancel, cancelled) = watch::channel(true);
    // Longer than the pause, and a loop would have no end.
    let driven = tokio::time::timeout(STORE_PAUSE * 12, drive(&bench, open, cancelled)).await;
    driven.expect("it returns").expect("the store works");
    let batch = bed.store.batch(&nobody(), &id).await.expect("read").expect("there");
    assert_eq!(batch.status, BatchStatus::InProgress);
    bed.runner = tokio::spawn(run(bed.gateway.clone()));
    let batch = bed.ended(&nobody(), &id).await;
    assert_eq!((batch.status, batch.counts.completed), (BatchStatus::Completed, 1));
}

/// Entries of the running month are needed by its budgets, older ones by none.
#[tokio::test]
async fn entries_that_a_budget_needs_outlive_ledger_days() {
    let days = "[store]\nledger_days = 1\n".to_owned();
    let month = "[[limits]]\nid = \"it\"\nfor = \"everyone\"\nby = \"all\"\nrequests_per_month = 5\n";
    let begin = penstock_govern::began(unix_seconds() * 1000).1 / 1000;
    // A day is left for gateways whose clocks differ.
    let (old, needed) = (begin - 86_401, begin - 86_399);
    let entry = |at: u64| {
        let opened = OpenEntry { at, request: format!("r{at}"), ..OpenEntry::default() };
        Entry { opened, ..Entry::default() }
    };
    for (config, left) in [(days.clone(), vec![]), (days + month, vec![needed])] {
        let bed = Bed::new(memory(), &config);
        bed.runner.abort();
        bed.store.settle_entries([old, needed].map(entry).into()).await.expect("settled");
        sweep(&bed.gateway, bed.gateway.keeper().expect("a store")).await.expect("swept");
        let filter = EntryFilter { until: u64::MAX >> 1, ..EntryFilter::default() };
        let page = Page { after: None, limit: 10, order: Order::default() };
        let entries = bed.store.entries(&filter, &page).await.expect("read").items;
        assert_eq!(entries.iter().map(|entry| entry.opened.at).collect::<Vec<_>>(), left);
    }
}

#[tokio::test]
async fn results_of_a_key_are_bounded_in_bytes_over_all_of_its_batches() {
    let keys = ["one", "other"].map(|id| format!("[[keys]]\nid = \"{id}\"\nkey_env = \"{id}\"\n")).concat();
    let bed = Bed::new(memory(), &format!("[batches]\nkey_output_bytes_max = 2048\nconcurrency = 1\n{keys}"));
    let (one, other) = (Tenant::new("one"), Tenant::new("other"));
    // A result has about 200 bytes: ten fit, and the eleventh line still runs.
    let first = bed.batch(&one, &file(&["ok"; 8]), tomorrow()).await;
    assert_eq!(bed.ended(&one, &first).await.counts.completed, 8);
    let id = bed.batch(&one, &file(&["ok"; 20]), tomorrow()).await;
    let batch = bed.ended(&one, &id).await;
    assert_eq!((batch.status, batch.counts.total), (BatchStatus::Completed, 20));
    let (output, errors) = (bed.lines(&one, batch.output.as_ref()).await, bed.lines(&one, batch.errors.as_ref()).await);
    assert!((1..12).contains(&output.len()) && output.len() + errors.len() == 20, "{output:?}");
    assert!(errors.iter().all(|line| line.contains(r#""code":"storage_quota_exceeded""#)), "{errors:?}");
    assert_eq!(bed.script.opened.load(Ordering::SeqCst), 8 + output.len(), "what is refused is not run");
    let kept = bed.store.file(&one, batch.output.as_ref().expect("a file")).await.expect("read").expect("there").bytes;
    let before = bed.store.batch(&one, &first).await.expect("read").expect("there").output.expect("a file");
    let before = bed.store.file(&one, &before).await.expect("read").expect("there").bytes;
    assert!((2048..2048 + 300).contains(&(kept + before)), "one line beyond the bound at most: {before} + {kept}");

    // Another key has room of its own.
    let id = bed.batch(&other, &file(&["ok"; 2]), tomorrow()).await;
    let batch = bed.ended(&other, &id).await;
    assert_eq!(batch.counts.completed, 2);
    let create = |tenant: Tenant, input: FileId| {
        let new = NewBatch { tenant_output_bytes_max: 2048, ..new_batch(input, tomorrow()) };
        let store = bed.store.clone();
        async move { store.create_batch(&tenant, new).await }
    };
    assert!(create(other, batch.input).await.expect("made").is_some());
    let input = put(bed.store.as_ref(), &one, &file(&["ok"])).await;
    let refused = create(one, input).await;
    assert!(matches!(refused, Err(StoreError::Quota { max: 2048, .. })), "{refused:?}");
}

/// Another attempt at an answer that finds no memory costs money at a provider, and at a pool of ours its work alone.
#[tokio::test]
async fn an_answer_of_a_provider_that_finds_no_memory_is_made_once() {
    for (text, attempts) in [("large", 1), ("large pool", 2)] {
        let bed = Bed::new(memory(), "[server]\nanswer_memory_bytes_max = 67108864\n[batches]\nattempts_max = 2\n");
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
        let line = format!(r#"{{"custom_id":"c","method":"POST","url":"/v1/chat/completions","body":{body}}}"#) + "\n";
        let id = bed.batch(&nobody(), &line, tomorrow()).await;
        let batch = bed.ended(&nobody(), &id).await;
        let errors = bed.lines(&nobody(), batch.errors.as_ref()).await;
        assert!(errors.len() == 1 && errors[0].contains("memory for answers"), "{errors:?}");
        assert_eq!(bed.script.opened.load(Ordering::SeqCst), attempts, "{text}");
    }
}

#[tokio::test]
async fn a_window_that_ends_expires_what_is_left() {
    let bed = Bed::new(memory(), "");
    let id = bed.batch(&nobody(), &file(&["ok", "hang"]), unix_seconds() + 2).await;
    let batch = bed.ended(&nobody(), &id).await;
    assert_eq!((batch.status, batch.counts.completed, batch.counts.failed), (BatchStatus::Expired, 1, 1));
    let errors = bed.lines(&nobody(), batch.errors.as_ref()).await;
    assert!(errors[0].contains("batch_expired"), "{errors:?}");
}

#[tokio::test]
async fn the_owner_has_the_rights_that_it_has_now() {
    let keys = "[[keys]]\nid = \"a\"\nkey_env = \"A\"\nmodels = [\"other\"]\n";
    let bed = Bed::new(memory(), keys);
    for (owner, code) in [("a", "model_not_found"), ("removed", "invalid_api_key")] {
        let tenant = Tenant::new(owner);
        let id = bed.batch(&tenant, &file(&["ok"]), tomorrow()).await;
        let batch = bed.ended(&tenant, &id).await;
        let errors = bed.lines(&tenant, batch.errors.as_ref()).await;
        assert!(errors[0].contains(code), "{errors:?}");
    }
    assert_eq!(bed.script.opened.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn what_a_runner_left_is_done_by_the_next_once() {
    let store = memory();
    let what: Vec<&str> = (0..400).map(|at| if at == 300 { "flaky" } else { "ok" }).collect();
    let first = Bed::new(store.clone(), "");
    let id = first.batch(&nobody(), &file(&what), tomorrow()).await;
    // Each stop is as abrupt as a kill: tasks vanish wherever they are.
    let mut done = 0;
    let mut bed = first;
    for stop in [1, 50, 200, 390] {
        done = bed.until(&nobody(), &id, |batch| batch.counts.completed >= stop).await.counts.completed;
        drop(bed);
        bed = Bed::new(store.clone(), "");
    }
    assert!(done >= 390);
    let batch = bed.ended(&nobody(), &id).await;
    assert_eq!((batch.counts.total, batch.counts.completed, batch.counts.failed), (400, 400, 0));
    let lines = bed.lines(&nobody(), batch.output.as_ref()).await;
    for (at, line) in lines.iter().enumerate() {
        assert!(line.contains(&format!("\"custom_id\":\"c{at}\"")), "line {at}: {line}");
    }
    assert_eq!(lines.len(), 400);
}

#[tokio::test]
async fn a_line_that_pauses_does_not_keep_the_lead_of_a_process_that_leaves() {
    let mut bed = Bed::new(memory(), "");
    let id = bed.batch(&nobody(), &file(&["ok", "later"]), tomorrow()).await;
    bed.until(&nobody(), &id, |batch| batch.counts.completed == 1).await;
    bed.opened(2).await;
    bed.gateway.leave();
    Bed::rests(&mut bed.runner).await;
    let batch = bed.store.batch(&nobody(), &id).await.expect("read").expect("there");
    assert_eq!((batch.status, batch.counts.completed, batch.counts.failed), (BatchStatus::InProgress, 1, 0));
}

#[tokio::test]
async fn a_batch_is_cancelled_in_the_process_that_leaves() {
    let mut bed = Bed::new(memory(), "");
    let id = bed.batch(&nobody(), &file(&["ok", "hang"]), tomorrow()).await;
    bed.until(&nobody(), &id, |batch| batch.counts.completed == 1).await;
    bed.hangs(1).await;
    bed.gateway.leave();
    bed.store.cancel_batch(&nobody(), &id, unix_seconds()).await.expect("cancelled");
    bed.hangs(0).await;
    Bed::rests(&mut bed.runner).await;
    // Its end is the next leader's.
    let batch = bed.store.batch(&nobody(), &id).await.expect("read").expect("there");
    assert_eq!((batch.status, batch.counts.completed, batch.counts.failed), (BatchStatus::Cancelling, 1, 0));
    let next = Bed::new(bed.store.clone(), "");
    assert_eq!(next.ended(&nobody(), &id).await.status, BatchStatus::Cancelled);
}

#[tokio::test]
async fn a_background_response_is_cancelled_in_the_process_that_leaves() {
    let bed = Bed::new(memory(), "");
    let mut runner = tokio::spawn(background::run(bed.gateway.clone()));
    let record = queued_response(r#"{"model":"m","input":"hang","background":true}"#);
    let id = record.id.clone();
    let room = ResponseRoom { tenant_max: 10, tenant_bytes_max: 1 << 20, bytes_max: 1 << 20 };
    bed.store.save_response(&nobody(), record, room).await.expect("saved");
    bed.gateway.keeper().expect("a store").wake_responses.notify_one();
    bed.hangs(1).await;
    bed.gateway.leave();
    // As another process does it.
    let (body, output) = (Bytes::from_static(b"{}"), Bytes::from_static(b"[]"));
    let change = ResponseChange { status: ResponseStatus::Ended, body, output, events: Bytes::new() };
    assert!(bed.store.update_response(&id, change, None).await.expect("changed"));
    bed.hangs(0).await;
    Bed::rests(&mut runner).await;
}

#[tokio::test]
async fn what_runs_when_the_process_ends_is_settled_and_is_the_next_ones() {
    const LIMITED: &str =
        "[[keys]]\nid = \"one\"\nkey_env = \"one\"\nlimits = [\"it\"]\n[[limits]]\nid = \"it\"\nin_flight = 9\n";
    let one = Tenant::new("one");
    let holds = |gateway: &Gateway| {
        let mut gauges = Vec::new();
        gateway.governor.gauges(&mut gauges);
        gauges.iter().find(|(gauge, ..)| *gauge == Gauge::LimitHolds).map(|(.., value)| *value as u64)
    };
    let mut bed = Bed::new(memory(), LIMITED);
    let mut runner = tokio::spawn(background::run(bed.gateway.clone()));
    let room = ResponseRoom { tenant_max: 10, tenant_bytes_max: 1 << 20, bytes_max: 1 << 20 };
    let records = ["", r#","stream":true"#]
        .map(|more| queued_response(&format!(r#"{{"model":"m","input":"hang","background":true{more}}}"#)));
    let [whole, streamed] = records.each_ref().map(|record| record.id.clone());
    for record in records {
        bed.store.save_response(&one, record, room).await.expect("saved");
    }
    bed.gateway.keeper().expect("a store").wake_responses.notify_one();
    let id = bed.batch(&one, &file(&["ok", "hang", "later"]), tomorrow()).await;
    bed.until(&one, &id, |batch| batch.counts.completed == 1).await;
    bed.opened(5).await;
    bed.hangs(3).await;
    assert_eq!(holds(&bed.gateway), Some(3));

    bed.gateway.begin_no_work();
    bed.hangs(3).await;
    assert!(!bed.gateway.stop_work(), "it runs");
    bed.hangs(0).await;
    Bed::rests(&mut bed.runner).await;
    Bed::rests(&mut runner).await;
    assert!(bed.gateway.stop_work());
    assert_eq!(holds(&bed.gateway), Some(0), "settled");
    let batch = bed.store.batch(&one, &id).await.expect("read").expect("there");
    assert_eq!((batch.status, batch.counts.completed, batch.counts.failed), (BatchStatus::InProgress, 1, 0));
    for (id, expected) in [(&whole, ResponseStatus::InProgress), (&streamed, ResponseStatus::Queued)] {
        let state = bed.store.response_state(&one, id).await.expect("read").expect("there");
        assert_eq!(state.status, expected);
    }

    let next = Bed::new(bed.store.clone(), LIMITED);
    let runner = tokio::spawn(background::run(next.gateway.clone()));
    next.hangs(3).await;
    next.opened(4).await;
    assert_eq!(next.script.opened.load(Ordering::SeqCst), 4, "what was left, once");
    runner.abort();
}

/// The store of these tests makes everybody the leader, as a lost session makes a second one.
#[tokio::test]
async fn a_batch_that_a_living_gateway_runs_is_left_alone() {
    let one = Bed::new(memory(), "");
    let id = one.batch(&nobody(), &file(&["ok", "hang"]), tomorrow()).await;
    one.hangs(1).await;
    let two = Bed::new(one.store.clone(), "");
    let other = two.batch(&nobody(), &file(&["ok"]), tomorrow()).await;
    assert_eq!(two.ended(&nobody(), &other).await.status, BatchStatus::Completed);
    // Several times as long as the other needs to be taken for dead.
    sleep(Duration::from_secs(1)).await;
    two.hangs(0).await;
    let calls = [&one, &two].map(|bed| bed.script.opened.load(Ordering::SeqCst)).iter().sum::<usize>();
    assert_eq!(calls, 3, "each line once");

    // One is cut off from the store: its batch goes on at two, and one stops it when it is back.
    one.renewal.abort();
    two.hangs(1).await;
    one.hangs(1).await;
    let renewal = renewal(&one.gateway);
    one.hangs(0).await;
    sleep(Duration::from_millis(200)).await;
    two.hangs(1).await;
    one.hangs(0).await;
    renewal.abort();
    let batch = two.store.batch(&nobody(), &id).await.expect("read").expect("there");
    assert_eq!((batch.status, batch.counts.completed, batch.counts.failed), (BatchStatus::InProgress, 1, 0));
}

#[tokio::test]
async fn a_streamed_response_that_a_living_gateway_runs_is_not_ended() {
    let one = Bed::new(memory(), "");
    let runner = tokio::spawn(background::run(one.gateway.clone()));
    let record = queued_response(r#"{"model":"m","input":"hang","background":true,"stream":true}"#);
    let id = record.id.clone();
    let room = ResponseRoom { tenant_max: 10, tenant_bytes_max: 1 << 20, bytes_max: 1 << 20 };
    one.store.save_response(&nobody(), record, room).await.expect("saved");
    one.gateway.keeper().expect("a store").wake_responses.notify_one();
    one.hangs(1).await;
    let state = async || {
        let state = one.store.response_state(&nobody(), &id).await.expect("read");
        state.expect("there").status
    };
    let two = Bed::new(one.store.clone(), "");
    let second = tokio::spawn(background::run(two.gateway.clone()));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(state().await, ResponseStatus::InProgress);
    assert_eq!(two.script.opened.load(Ordering::SeqCst), 0);

    // A gateway that is gone cannot go on, and clients have had its events.
    runner.abort();
    one.renewal.abort();
    let deadline = Instant::now() + Duration::from_secs(60);
    while state().await != ResponseStatus::Ended {
        assert!(Instant::now() < deadline, "it is not ended");
        sleep(Duration::from_millis(5)).await;
    }
    let body = one.store.response(&nobody(), &id).await.expect("read").expect("there").body;
    assert!(String::from_utf8_lossy(&body).contains("\"failed\""), "{body:?}");
    assert_eq!(two.script.opened.load(Ordering::SeqCst), 0);
    second.abort();
}

/// As long as this process has the lead, no other one can delete what has expired, and make room for results.
#[tokio::test]
async fn a_process_that_leaves_sweeps_while_it_has_the_lead() {
    let bed = Bed::new(memory(), "");
    let id = bed.batch(&nobody(), &file(&["hang"]), tomorrow()).await;
    bed.hangs(1).await;
    bed.gateway.leave();
    let bench = Bench::new(bed.gateway.clone());
    let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
    let (cancel, _cancelled) = watch::channel(false);
    let mut active = HashMap::from([(id, Active { tenant: nobody(), cancel, task })]);
    assert!(turn(&bench, &mut JoinSet::new(), &mut active).await.expect("looked"), "it leads");
    assert!(!turn(&bench, &mut JoinSet::new(), &mut HashMap::new()).await.expect("looked"), "nothing keeps it");
}

/// Earlier turns above the key's share of the memory for answers are charged to nobody; above the whole, the response fails.
#[tokio::test]
async fn a_response_with_large_earlier_turns_does_not_wait_for_ever() {
    const MIB: usize = 1 << 20;
    let one = Tenant::new("one");
    for (memory_bytes, runs) in [(100 * MIB, true), (64 * MIB, false)] {
        let config = format!(
            "[server]\nbody_bytes_max = {}\nbody_memory_bytes_max = {}\nanswer_memory_bytes_max = {memory_bytes}\n\
             [[keys]]\nid = \"one\"\nkey_env = \"one\"\n",
            128 * MIB,
            512 * MIB
        );
        let bed = Bed::new(memory(), &config);
        let room = ResponseRoom { tenant_max: 10, tenant_bytes_max: 1 << 30, bytes_max: 1 << 30 };
        let earlier = ResponseRecord {
            status: ResponseStatus::Ended,
            output: format!("[{}]", " ".repeat(80 * MIB)).into(),
            ..queued_response("")
        };
        let request = format!(
            r#"{{"model":"m","input":"hang","background":true,"previous_response_id":"{}"}}"#,
            earlier.id.as_str()
        );
        let next = ResponseRecord { previous: Some(earlier.id.clone()), ..queued_response(&request) };
        let id = next.id.clone();
        for record in [earlier, next] {
            bed.store.save_response(&one, record, room).await.expect("saved");
        }
        let runner = tokio::spawn(background::run(bed.gateway.clone()));
        if runs {
            bed.hangs(1).await;
        } else {
            let deadline = Instant::now() + Duration::from_secs(60);
            while bed.store.response_state(&one, &id).await.expect("read").expect("there").status
                != ResponseStatus::Ended
            {
                assert!(Instant::now() < deadline, "it has not ended");
                sleep(Duration::from_millis(5)).await;
            }
            let body = bed.store.response(&one, &id).await.expect("read").expect("there").body;
            let body = String::from_utf8_lossy(&body).into_owned();
            assert!(body.contains("\"failed\"") && body.contains("answer_memory_bytes_max"), "{body}");
        }
        runner.abort();
    }
}

/// A result that was paid for waits for the store, whatever ends the batch meanwhile; what has no answer yet is stopped.
#[tokio::test]
async fn an_answer_that_waits_for_the_store_is_kept_when_the_batch_ends() {
    for is_cancelled in [true, false] {
        let bed = Bed::new(small(), "");
        // Time for all that comes before the store has refused the result, on a slow machine, too.
        let expires = if is_cancelled { tomorrow() } else { unix_seconds() + 10 };
        let id = bed.batch(&nobody(), &file(&["gate", "hang"]), expires).await;
        bed.opened(2).await;
        let full = fill(bed.store.as_ref()).await;
        let errors = bed.store.stats().errors;
        bed.script.gate.add_permits(1);
        bed.refuses(errors).await;
        if is_cancelled {
            bed.store.cancel_batch(&nobody(), &id, unix_seconds()).await.expect("cancelled");
            bed.gateway.keeper().expect("a store").wake.notify_one();
        }
        bed.hangs(0).await;
        sleep(Duration::from_millis(200)).await;
        bed.store.delete_file(&filler(), &full).await.expect("deleted");
        let batch = bed.ended(&nobody(), &id).await;
        let expected = if is_cancelled { BatchStatus::Cancelled } else { BatchStatus::Expired };
        assert_eq!((batch.status, batch.counts.completed, batch.counts.failed), (expected, 1, 1));
        assert_eq!(bed.lines(&nobody(), batch.output.as_ref()).await.len(), 1);
    }
}

/// The lines of a batch are answered in it; whoever answers later bills an answer that nobody can fetch.
#[tokio::test]
async fn a_line_that_wants_its_answer_later_is_refused() {
    let bed = Bed::new(memory(), "");
    for (endpoint, body, field) in [
        ("/v1/responses", r#"{"model":"m","input":"ok","background":true}"#, Some("background")),
        ("/v1/responses", r#"{"model":"m","input":"ok","background":1}"#, Some("background")),
        ("/v1/responses", r#"{"model":"m","input":"ok","background":false}"#, None),
        ("/v1/responses", r#"{"model":"m","input":"ok","background":null}"#, None),
        ("/v1/chat/completions", r#"{"model":"m","messages":[],"deferred":true}"#, Some("deferred")),
        ("/v1/chat/completions", r#"{"model":"m","messages":[],"deferred":false,"background":true}"#, None),
    ] {
        let before = bed.script.opened.load(Ordering::SeqCst);
        let line = format!(r#"{{"custom_id":"c0","method":"POST","url":"{endpoint}","body":{body}}}"#);
        let input = put(bed.store.as_ref(), &nobody(), &(line + "\n")).await;
        let new = NewBatch { endpoint: endpoint.into(), ..new_batch(input, tomorrow()) };
        let id = bed.store.create_batch(&nobody(), new).await.expect("made").expect("the file is there").id;
        bed.gateway.keeper().expect("a store").wake.notify_one();
        let batch = bed.ended(&nobody(), &id).await;
        let asked = bed.script.opened.load(Ordering::SeqCst) - before;
        assert_eq!((batch.counts.failed > 0, asked), (field.is_some(), usize::from(field.is_none())), "{body}");
        let Some(field) = field else { continue };
        let errors = bed.lines(&nobody(), batch.errors.as_ref()).await;
        assert!(
            errors[0].contains(r#""status_code":400"#) && errors[0].contains(&format!("\"param\":\"{field}\"")),
            "{errors:?}"
        );
    }
}

/// Reasoning of a batch comes back in live requests of its owner, and that of live answers in lines.
#[tokio::test]
async fn lines_are_signed_as_live_answers_of_their_owner_are() {
    let keys = "[auth]\nanonymous = \"allow\"\n[[keys]]\nid = \"a\"\nkey_env = \"A\"\n";
    let bed = Bed::new(memory(), keys);
    let mut known = Vec::new();
    for (owner, endpoint) in [("a", MESSAGES), ("", MESSAGES), ("a", "/v1/chat/completions")] {
        let body = r#"{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"sign"}]}"#;
        let line = match endpoint {
            MESSAGES => format!(r#"{{"custom_id":"c0","params":{body}}}"#),
            _ => format!(r#"{{"custom_id":"c0","method":"POST","url":"{endpoint}","body":{body}}}"#),
        };
        let tenant = Tenant::new(owner);
        let input = put(bed.store.as_ref(), &tenant, &(line + "\n")).await;
        let new = NewBatch { endpoint: endpoint.into(), ..new_batch(input, tomorrow()) };
        let id = bed.store.create_batch(&tenant, new).await.expect("made").expect("the file is there").id;
        bed.gateway.keeper().expect("a store").wake.notify_one();
        let batch = bed.ended(&tenant, &id).await;
        let output = bed.lines(&tenant, batch.output.as_ref()).await;
        let answer: serde_json::Value = serde_json::from_str(&output[0]).expect("JSON");
        let (of_messages, of_chat) = (&answer["result"]["message"], &answer["response"]["body"]);
        let signature = of_messages["signature"].as_str().or(of_chat["signature"].as_str()).map(str::to_owned);
        let surface = surface_of(endpoint).expect("an endpoint of batches");
        let serving = bed.gateway.serving();
        let principal = bed.gateway.guard.recall(&serving.identity, bed.store.as_ref(), owner, surface).await;
        let signer = bed.gateway.signer(Surface::Messages, &principal.expect("it may")).await.expect("a store");
        let is_ours = signature.as_ref().map(|signature| signer.is_of("m", "thought", signature));
        assert_eq!(is_ours, (endpoint == MESSAGES).then_some(true), "{owner:?} {endpoint}: {output:?}");
        known.extend(signature);
    }
    assert!(known.len() == 2 && known[0] != known[1], "each is its owner's: {known:?}");
}

/// A client that follows here what another gateway answers gives this process a log; the events that the other has told
/// are not in it.
#[tokio::test]
async fn a_streamed_response_of_a_gateway_that_is_gone_is_not_begun_again_where_a_client_follows() {
    let bed = Bed::new(memory(), "");
    let request = r#"{"model":"m","input":"ok","background":true,"stream":true}"#;
    let record = ResponseRecord { status: ResponseStatus::InProgress, ..queued_response(request) };
    let id = record.id.clone();
    let queued = Bytes::from_static(b"event: a\ndata: {}\n\nevent: b\ndata: {}\n\n");
    let log = bed.gateway.keeper().expect("a store").logs.of(&id, || Log::new(&queued, 1 << 20));
    assert_eq!(log.next(), 2, "as long as a response waits");
    let room = ResponseRoom { tenant_max: 10, tenant_bytes_max: 1 << 20, bytes_max: 1 << 20 };
    bed.store.save_response(&nobody(), record, room).await.expect("saved");
    let runner = tokio::spawn(background::run(bed.gateway.clone()));
    let deadline = Instant::now() + Duration::from_secs(60);
    while bed.store.response_state(&nobody(), &id).await.expect("read").expect("there").status != ResponseStatus::Ended
    {
        assert!(Instant::now() < deadline, "it has not ended");
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(bed.script.opened.load(Ordering::SeqCst), 0);
    let body = bed.store.response(&nobody(), &id).await.expect("read").expect("there").body;
    assert!(String::from_utf8_lossy(&body).contains("\"failed\""), "{body:?}");
    runner.abort();
}
