"""Alert rules, by Prometheus' own tool. Names and labels are compared with the gateway's table by a test of penstock-telemetry."""

from __future__ import annotations

import yaml
from rooms import PACKAGING, run

FOLDER = PACKAGING / "prometheus"


def rules() -> list[dict]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_prometheus_accepts_the_rules():
    done = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", FOLDER / "alerts.yaml")
    assert f"{len(rules())} rules found" in done.stdout


def test_the_rules_fire_as_their_cases_say():
    run("promtool", "test", "rules", FOLDER / "alerts_test.yaml")


def test_every_rule_has_a_case_and_says_what_to_do():
    cases = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules()}
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"]["summary"].endswith(".") and rule["annotations"]["description"].endswith("."), rule
