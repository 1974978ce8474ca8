"""The Helm chart: linted and rendered by Helm, its objects held to Kubernetes' schemas, its config to `penstock check`."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tomllib
from pathlib import Path

import helm_python
import kubernetes_validate
import pytest
import yaml
from rooms import DEMO_MODEL, PACKAGING, binary, chat, migration_seconds, run, started

CHART = PACKAGING / "helm" / "penstock"
VALUES = {
    "default": {},
    "full": yaml.safe_load((CHART / "ci" / "full-values.yaml").read_text()),
    "follow": yaml.safe_load((CHART / "ci" / "follow-values.yaml").read_text()),
}
# The oldest version that Chart.yaml allows, and the newest whose schemas there are.
KUBERNETES = ("1.30", kubernetes_validate.latest_version())
# Objects of other programs' definitions, for which there is no schema here: only their names, and the rules by promtool, are checked.
FOREIGN = {"ServiceMonitor", "PrometheusRule"}


def render(values: dict, name: str = "ai", namespace: str = "ai") -> list[dict]:
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=name, namespace=namespace)
    return [
        thing for path, text in files.items() if path.endswith(".yaml") for thing in yaml.safe_load_all(text) if thing
    ]


def test_the_chart_is_of_this_version():
    version = run(binary(), "version").stdout.split()[1]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == about["version"] == version
    compose = (PACKAGING / "container/compose.yaml").read_text()
    assert f"image: penstock:${{PENSTOCK_VERSION:-{version}}}" in compose


def of_kind(things: list[dict], kind: str) -> list[dict]:
    return [thing for thing in things if thing["kind"] == kind]


def container(thing: dict) -> dict:
    return thing["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("case", VALUES)
def test_helm_has_no_complaint(case):
    report = helm_python.lint(CHART, VALUES[case], strict=True)
    # Severity 1 is advice: an icon.
    assert [said for said in report["messages"] if said["severity"] > 1] == [] and not report["errors"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", VALUES)
def test_objects_are_valid(case, version):
    things = render(VALUES[case])
    for thing in things:
        if thing["kind"] not in FOREIGN:
            kubernetes_validate.validate(thing, version, strict=True)
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in things]
    assert len(set(names)) == len(names)
    for _, name in names:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name), name


def written_in(things: list[dict]) -> list[str]:
    """Places where the gateway's pod has a volume that it can write to."""
    held = container(of_kind(things, "Deployment")[0])
    return [mount["mountPath"] for mount in held["volumeMounts"] if not mount.get("readOnly")]


def on_this_machine(things: list[dict], folder: Path) -> str:
    """The gateway's config with files of this machine in the places where a pod has its own."""
    config = of_kind(things, "ConfigMap")[0]["data"]["penstock.toml"]
    places = written_in(things)
    for place in places:
        volume = folder / Path(place).name
        volume.mkdir(exist_ok=True)
        # As the cluster makes an empty folder with an fsGroup. (A claim's is 2775: for the whole group.)
        volume.chmod(0o2777)
    config = re.sub(
        rf'"({"|".join(places)})(/[^"]*)?"',
        lambda found: f'"{folder / Path(found[1]).name}{found[2] or ""}"',
        config,
    )
    config = re.sub(r'"/models/[^"]*"', f'"{DEMO_MODEL}"', config)
    certificate(folder)
    for path in sorted(set(re.findall(r'"(/(?:var/)?run/secrets/[^"]+)"', config))):
        made = folder / path.replace("/", "_")
        if path.endswith(".key"):
            made.write_bytes((folder / "key.pem").read_bytes())
        elif path.endswith(".crt"):
            made.write_bytes((folder / "certificate.pem").read_bytes())
        else:
            made.write_text("secret" * 8)
        config = config.replace(f'"{path}"', f'"{made}"')
    return config


def certificate(folder: Path) -> None:
    if not (folder / "key.pem").exists():
        made = ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem", "-subj", "/CN=penstock"]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        run("openssl", "req", "-x509", *curve, "-nodes", "-days", "2", *made)


@pytest.mark.parametrize("case", VALUES)
def test_gateways_accept_their_config(case, tmp_path):
    config = tmp_path / "penstock.toml"
    config.write_text(on_this_machine(render(VALUES[case]), tmp_path))
    env = {
        "OPENAI_API_KEY": "sk-example",
        "SEARCH_KEY": "sk-another-example",
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    assert "nothing is wrong" in run(binary(), "check", "--config", config, env=env).stdout


@pytest.mark.parametrize("case", VALUES)
def test_the_state_is_in_a_folder_that_the_gateway_makes(case):
    """Below a volume and not its root, whose owner and mode are the cluster's."""
    things = render(VALUES[case])
    config = tomllib.loads(of_kind(things, "ConfigMap")[0]["data"]["penstock.toml"])
    state = Path(config["server"]["state_dir"])
    places = [Path(place) for place in written_in(things)]
    assert state not in places and any(place in state.parents for place in places)


def test_the_default_serves(tmp_path):
    """`helm install` without values: one gateway and the worker of its demo model, with the volumes of a cluster."""
    text = on_this_machine(render({}), tmp_path)
    (tmp_path / "penstock.toml").write_text(text)
    command = [binary(), "serve", "--config", tmp_path / "penstock.toml", "--admin", "off"]
    with started(command, tmp_path / "log") as gateway:
        # Beyond loopback, as the config listens, nobody is served without a key: here the test's address is loopback.
        assert chat(gateway.url)
    state = Path(tomllib.loads(text)["server"]["state_dir"])
    assert state.stat().st_mode & 0o077 == 0 and state.parent.stat().st_mode & 0o7777 == 0o2777


@pytest.mark.parametrize("case", VALUES)
def test_every_secret_of_the_config_is_mounted(case):
    things = render(VALUES[case])
    config = of_kind(things, "ConfigMap")[0]["data"]["penstock.toml"]
    (gateway,) = of_kind(things, "Deployment")
    pod = gateway["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(gateway)["volumeMounts"]}
    account = "/var/run/secrets/kubernetes.io/serviceaccount/"
    for path in re.findall(r'"(/(?:etc|models|run|var)/[^"]+)"', config):
        if path.startswith(account):
            assert pod["automountServiceAccountToken"] is True
            continue
        place = max((mount for mount in mounts if f"{path}/".startswith(f"{mount}/")), key=len, default=None)
        assert place, f"{path} is not mounted"
        if "projected" in mounts[place]:
            files = [
                item["path"] for source in mounts[place]["projected"]["sources"] for item in source["secret"]["items"]
            ]
            assert path.removeprefix(f"{place}/") in files


@pytest.mark.parametrize("case", ["full", "follow"])
def test_workers_are_where_the_config_says(case):
    things = render(VALUES[case])
    config = of_kind(things, "ConfigMap")[0]["data"]["penstock.toml"]
    sets = {thing["metadata"]["name"]: thing for thing in of_kind(things, "StatefulSet")}
    services = {thing["metadata"]["name"] for thing in of_kind(things, "Service")}
    addresses = re.findall(r"tcp://([\w-]+)-(\d+)\.([\w-]+)\.(\w+)\.svc:(\d+)", config)
    assert addresses
    for name, index, service, namespace, port in addresses:
        assert name in sets and service == sets[name]["spec"]["serviceName"] and service in services
        assert namespace == "ai" and int(index) < sets[name]["spec"].get("replicas", 4)
        assert int(port) in [port["containerPort"] for port in container(sets[name])["ports"]]
    for name, thing in sets.items():
        args = container(thing)["args"]
        # Options of the program, read and not run.
        run(binary(), *args, "--help")
        assert f"--role={thing['metadata']['labels']['penstock/role']}" in args, name
        encrypted = "tls" in {volume["name"] for volume in thing["spec"]["template"]["spec"]["volumes"]}
        assert encrypted != ("--beyond-loopback" in args)


def test_the_gateway_may_scale_what_it_is_told_to():
    things = render(VALUES["follow"])
    config = of_kind(things, "ConfigMap")[0]["data"]["penstock.toml"]
    url = re.search(r"namespaces/(\w+)/statefulsets/([\w-]+)/scale", config)
    (role,), (binding,) = of_kind(things, "Role"), of_kind(things, "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [url[2]],
            "verbs": ["get", "patch"],
        }
    ]
    (gateway,) = of_kind(things, "Deployment")
    account = gateway["spec"]["template"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": url[1]}]
    # The number is the gateway's: an upgrade of the release does not set it back.
    (workers,) = of_kind(things, "StatefulSet")
    assert "replicas" not in workers["spec"]
    assert not of_kind(render(VALUES["default"]), "Role")


def test_pods_end_after_their_answers():
    for case in VALUES:
        things = render(VALUES[case])
        pod = of_kind(things, "Deployment")[0]["spec"]["template"]["spec"]
        grace = int(re.search(r"grace_ms = (\d+)", of_kind(things, "ConfigMap")[0]["data"]["penstock.toml"])[1]) / 1000
        asleep = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        # The workers of a gateway's own pod may take five seconds more.
        assert pod["terminationGracePeriodSeconds"] >= asleep + grace + 5
        for thing in of_kind(things, "StatefulSet"):
            drain = next(
                int(arg.split("=")[1]) for arg in container(thing)["args"] if arg.startswith("--drain-deadline")
            )
            assert thing["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain


def test_pods_have_no_rights():
    for thing in [
        thing for case in VALUES.values() for thing in render(case) if thing["kind"] in ("Deployment", "StatefulSet")
    ]:
        pod, held = thing["spec"]["template"]["spec"], container(thing)
        assert (
            pod["securityContext"]["runAsNonRoot"]
            and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        )
        assert held["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_migration_is_waited_for():
    gateways = of_kind(render({}), "Deployment")[0]
    probe = container(gateways)["startupProbe"]
    waits = probe["periodSeconds"] * probe["failureThreshold"]
    assert waits >= migration_seconds() + 120
    # Kubernetes' own 600 s would call the rollout failed before.
    assert gateways["spec"]["progressDeadlineSeconds"] > waits


def notes(values: dict) -> str:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values, name="ai", namespace="ai")
    (text,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    return text


def test_who_has_state_in_a_claim_is_told_where_it_is_looked_for():
    advice = "config: { server: { state_dir: /var/lib/penstock } }"
    assert advice not in notes({}) and advice in notes({"gateway": {"stateClaim": "mine"}})
    assert "state is in /var/lib/penstock/state; the claim mine " in notes({"gateway": {"stateClaim": "mine"}})
    older = {"gateway": {"stateClaim": "mine"}, "config": {"server": {"state_dir": "/var/lib/penstock"}}}
    assert "state is in /var/lib/penstock; " in notes(older)


def test_probes_ask_what_is_open():
    reference = (PACKAGING.parent / "docs" / "reference" / "operations.md").read_text()
    held = container(of_kind(render({}), "Deployment")[0])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = held[probe]["httpGet"]["path"]
        assert re.search(rf"^\| `GET {path}`.*\| no \|$", reference, re.M), path
    full = container(of_kind(render(VALUES["full"]), "Deployment")[0])
    assert full["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_only_members_reach_workers():
    policies = of_kind(render(VALUES["full"]), "NetworkPolicy")
    workers = [policy for policy in policies if "penstock/pool" in policy["spec"]["podSelector"]["matchLabels"]]
    assert len(workers) == 2
    for policy in workers:
        for rule in policy["spec"]["ingress"]:
            assert [list(peer) for peer in rule["from"]] == [["podSelector"]]
    (gateways,) = [policy for policy in policies if policy not in workers]
    assert gateways["spec"]["ingress"][0]["from"] == VALUES["full"]["networkPolicy"]["clients"]
    off = copy.deepcopy(VALUES["full"]) | {"networkPolicy": {"enabled": False}}
    assert not of_kind(render(off), "NetworkPolicy")


def test_the_endpoint_picker_is_a_service_of_its_own():
    assert not [thing for thing in render({}) if thing["metadata"]["name"].endswith("-picker")]
    for values, protocol in (({"endpointPicker": {"enabled": True}}, "kubernetes.io/h2c"), (VALUES["full"], None)):
        things = render(values)
        (service,) = [thing for thing in of_kind(things, "Service") if thing["metadata"]["name"].endswith("-picker")]
        (port,) = service["spec"]["ports"]
        assert (port["port"], port["targetPort"], port.get("appProtocol")) == (9002, "picker", protocol)
        (gateway,) = of_kind(things, "Deployment")
        assert {"name": "picker", "containerPort": 9002} in container(gateway)["ports"]
        labels = gateway["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        config = of_kind(things, "ConfigMap")[0]["data"]["penstock.toml"]
        assert "[endpoint_picker]\n" in config and 'listen = "0.0.0.0:9002"' in config
    assert 'client_ca = "/run/secrets/picker-tls/ca.crt"' in config
    policies = of_kind(things, "NetworkPolicy")
    rules = [rule for policy in policies for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": "picker"}]]
    assert [rule["from"] for rule in rules] == [VALUES["full"]["endpointPicker"]["clients"]]


def test_the_rules_of_prometheus_are_the_file(tmp_path):
    # Helm reads no file outside of the chart, so there is a copy (no link: not every checkout keeps links).
    rules = PACKAGING / "prometheus" / "alerts.yaml"
    assert (PACKAGING / "helm/penstock/files/alerts.yaml").read_bytes() == rules.read_bytes(), (
        "copy the rules into the chart"
    )
    (rule,) = of_kind(render(VALUES["full"]), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(rules.read_text())
    (monitor,) = of_kind(render(VALUES["full"]), "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["authorization"]["credentials"] == {"name": "penstock", "key": "metrics"}
    # Scraped by a key that may do nothing else.
    (config,) = of_kind(render(VALUES["full"]), "ConfigMap")
    assert (
        'id = "metrics"\nkey_file = "/run/secrets/penstock/metrics-key"\nroutes = ["/metrics"]'
        in config["data"]["penstock.toml"]
    )


POOL = {"id": "a", "keySecret": {"name": "s", "key": "k"}}
ONE = POOL | {"workers": {"mixed": {"replicas": 1}}}
SEVERAL = {"store": {"postgres": {"url": "postgres://u@h/d"}}, "pepper": {"secret": {"name": "s"}}}


def test_prometheus_is_told_the_gateway_s_authority_and_name():
    metrics = {"keySecret": {"name": "m"}, "serviceMonitor": {"enabled": True}}
    tls = {"gateway": {"tls": {"secretName": "t", "clientAuth": "none"}}, "metrics": metrics}

    def asked(**more) -> dict:
        values = copy.deepcopy(tls)
        values["metrics"]["serviceMonitor"] |= more
        (monitor,) = of_kind(render(values), "ServiceMonitor")
        return monitor["spec"]["endpoints"][0]["tlsConfig"]

    # A certificate of a public authority: its secret has no ca.crt, and one that is there would be of clients.
    assert asked() == {"serverName": "ai-penstock.ai.svc"}
    own = asked(caSecret="ca", serverName="ai.example")
    assert own == {"serverName": "ai.example", "ca": {"secret": {"name": "ca", "key": "ca.crt"}}}
    (monitor,) = of_kind(render({"metrics": metrics}), "ServiceMonitor")
    assert "tlsConfig" not in monitor["spec"]["endpoints"][0]


def test_numbers_that_are_zero_stay_zero():
    """In Helm, zero is empty and takes the default of a template."""
    values = {"pools": [POOL | {"workers": {"mixed": {"replicas": 1}}, "minReadySeconds": 0}]}
    (workers,) = of_kind(render(values), "StatefulSet")
    assert workers["spec"]["minReadySeconds"] == 0
    del values["pools"][0]["minReadySeconds"]
    (workers,) = of_kind(render(values), "StatefulSet")
    assert workers["spec"]["minReadySeconds"] == 60
    # Every other number of the schema may not be zero where a template has a default, except a port that zero is the default of.
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    defaults = set(re.findall(r"[.$][\w.]*?\.?(\w+) \| default \(?\d", templates))
    schema = json.loads((CHART / "values.schema.json").read_text())
    for name in defaults:
        assert zero_is_refused(schema, name), name


def zero_is_refused(schema: dict, name: str) -> bool:
    """Whether every number of that name in the schema has a least value above zero."""
    found = []

    def walk(node: object) -> None:
        if isinstance(node, dict):
            found.extend(one for key, one in node.get("properties", {}).items() if key == name)
            for one in node.values():
                walk(one)

    walk(schema)
    return bool(found) and all(one["minimum"] > 0 for one in found)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gateway": {"replicas": 2}}, "store.postgres.url"),
        ({"gateway": {"replicas": 2}, "store": {"postgres": {"url": "postgres://u@h/d"}}}, "pepper.secret"),
        ({"pools": [POOL]}, "has no workers"),
        ({"endpointPicker": {"tls": {"clientAuth": "required"}}}, "endpointPicker.tls.secretName"),
        ({"pools": [POOL | {"autoscale": {"min": 3, "max": 2}}]}, "autoscale.min is above"),
        (SEVERAL | {"gateway": {"autoscaling": {"enabled": True, "min": 8}}}, "gateway.autoscaling.min is above"),
        ({"gateway": {"autoscaling": {"enabled": True, "max": 1}}}, "gateway.autoscaling.min is above"),
        ({"pools": [POOL | {"workers": {"mixed": {"replicas": 1}}}] * 2}, "two pools have the id a"),
        ({"pools": [POOL | {"model": "m", "workers": {"mixed": {"replicas": 1}}}]}, "needs the volume"),
        ({"pools": [ONE | {"config": {"quantize": "int8"}}]}, "pool a: config.quantize is for workers"),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "metrics.keySecret"),
        ({"config": {"server": 1}}, "config"),
        ({"gatway": {}}, "gatway"),
        ({"pools": [{"id": "Qwen", "keySecret": {"name": "s", "key": "k"}}]}, "id"),
        ({"pools": [{"id": "qwen"}]}, "keySecret"),
        ({"store": {"postgres": {"url": "postgres://user:password@host/d"}}}, "url"),
        ({"gateway": {"readinessPath": "/"}}, "readinessPath"),
    ],
)
def test_bad_values_are_refused_by_name(values, says):
    with pytest.raises(helm_python.HelmError, match=re.escape(says)):
        render(values)


def test_settings_of_workers_are_refused_for_pods_as_the_gateway_refuses_them():
    """The chart's list is that of the keys which the gateway takes no more where it has connect."""
    pools = (PACKAGING.parent / "gateway/config/src/pools.rs").read_text()
    rows = re.search(r"^fn of_workers\(.*?^}", pools, re.M | re.S)[0]
    keys = set(re.findall(r'^        \("(\w+)",', rows, re.M)) | {"quantize", "kv_format"}
    assert len(keys) == rows.count("pool.") and {"threads", "gpu_memory_share", "shared_weights"} <= keys
    for key in keys:
        with pytest.raises(helm_python.HelmError, match=f"config.{key} is for workers"):
            render({"pools": [ONE | {"config": {key: 1}}]})


def test_a_misspelt_key_of_the_config_is_found_by_check(tmp_path):
    config = tmp_path / "penstock.toml"
    config.write_text(on_this_machine(render({"config": {"server": {"graze_ms": 1}}}), tmp_path))
    done = subprocess.run([binary(), "check", "--config", config], check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "graze_ms" in done.stderr


def test_values_become_toml_as_they_are():
    text = 'quotes " and \\ and line\nends, <tags> & more'
    given = {
        "plugins": [
            {"name": "headers", "settings": {"a.b": text, "n": 12345678, "f": 0.5, "on": True, "l": [1, {"x": "y"}]}}
        ]
    }
    (found,) = of_kind(render({"config": given}), "ConfigMap")
    assert tomllib.loads(found["data"]["penstock.toml"])["plugins"] == given["plugins"]
