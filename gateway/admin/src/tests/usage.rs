//! Usage and cost: sums by group, single requests, and CSV.

use penstock_store::{Entry, OpenEntry, Subject, Tokens};
use serde_json::Value;

use super::Api;

#[test]
fn usage_is_summed_by_anything() {
    let api = Api::start();
    let opened = |at: u64, key: &str, model: &str| OpenEntry {
        at,
        request: format!("req_{at}"),
        subject: Subject { key: key.into(), model: model.into(), ..Subject::default() }.into(),
        ..OpenEntry::default()
    };
    let entry = |at: u64, key: &str, model: &str| Entry {
        opened: opened(at, key, model),
        tokens: Tokens { input: 10, input_written: 3, output: 5, ..Tokens::default() },
        micro_usd: 250_000,
        status: 200,
        ..Entry::default()
    };
    let entries = vec![entry(1000, "a", "big"), entry(2000, "a", "small"), entry(3000, "b", "big")];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(api.store.settle_entries(entries.into())).expect("kept");
    let all = api.get("/admin/v1/usage?from=0&until=4000");
    assert_eq!((&all["data"][0]["requests"], &all["data"][0]["usd"]), (&3.into(), &0.75.into()));
    let by_key = api.get("/admin/v1/usage?from=0&until=4000&group=key&limit=1");
    assert_eq!((&by_key["data"][0]["groups"]["key"], &by_key["data"][0]["input_tokens"]), (&"a".into(), &20.into()));
    let next = by_key["next"].as_str().expect("there is more");
    let rest = api.get(&format!("/admin/v1/usage?from=0&until=4000&group=key&after={next}"));
    assert_eq!(rest["data"][0]["groups"]["key"], "b");
    assert_eq!(api.get("/admin/v1/usage?from=0&until=4000&key=b")["data"][0]["requests"], 1);
    let requests = api.get("/admin/v1/usage/requests?from=1500&until=4000&order=asc&limit=1");
    let first = &requests["data"][0];
    assert_eq!((&first["request_id"], &first["input_written_tokens"]), (&"req_2000".into(), &3.into()));
    let next = requests["next"].as_str().expect("there is more");
    let rest = api.get(&format!("/admin/v1/usage/requests?from=1500&until=4000&order=asc&after={next}"));
    assert_eq!((&rest["data"][0]["request_id"], &rest["next"]), (&"req_3000".into(), &Value::Null));
    let (_, head, text) =
        api.ask("GET", "/admin/v1/usage.csv?from=0&until=4000&group=key,model", &["authorization: Bearer viewer"], "");
    assert!(head.contains("text/csv") && text.starts_with("key,model,requests,"), "{text}");
    assert_eq!(text.lines().count(), 4);
    for wrong in ["group=colour", "limit=0", "from=-1"] {
        assert_eq!(api.call("viewer", "GET", &format!("/admin/v1/usage?{wrong}"), "").0, 400, "{wrong}");
    }
}
