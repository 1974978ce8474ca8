"""Files beside the packages: configs, Dockerfile, compose file, completions, manual pages, the list of what is linked."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from rooms import OWN_KEY, PACKAGING, ROOT, binary, provider, run, serving

CONTAINER = PACKAGING / "container"


@pytest.mark.parametrize("name", ["penstock.toml", "container/penstock.toml", "container/compose/penstock.toml"])
def test_configs_are_accepted(tmp_path, name):
    text = (PACKAGING / name).read_text().replace("/var/lib/penstock", str(tmp_path / "state"))
    for secret in ("database", "pepper"):
        (tmp_path / secret).write_text("x" * 48)
        text = text.replace(f"/run/secrets/{secret}", str(tmp_path / secret))
    config = tmp_path / "penstock.toml"
    config.write_text(text)
    assert "nothing is wrong" in run(binary(), "check", "--config", config).stdout


def test_commented_examples_are_keys_that_exist():
    """Lines that are commented out in the package's config, without their marks, are a config too."""
    text = (PACKAGING / "penstock.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    kept = [line for line in lines if re.match(r"^(\[\[?\w+\]\]?|\w+ = .*)$", line)]
    tables = tomllib.loads("\n".join(kept))
    every = (ROOT / "configs" / "penstock.toml").read_text()
    for name, entries in tables.items():
        for key in (key for entry in (entries if isinstance(entries, list) else [entries]) for key in entry):
            assert re.search(rf"^(# )?{key} = ", every, re.M), f"{name}.{key}"


def test_the_dockerfile_has_no_faults():
    hadolint = Path(sys.executable).with_name("hadolint")
    # DL3006 and others are of images that are built on others; ours is from scratch.
    done = subprocess.run([hadolint, CONTAINER / "Dockerfile"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_dockerfile_says_what_the_image_says():
    sys.path.insert(0, str(PACKAGING))
    import image

    text = (CONTAINER / "Dockerfile").read_text()
    assert f"USER {image.CONFIG['User']}\n" in text and f"ENTRYPOINT {json.dumps(image.CONFIG['Entrypoint'])}" in text
    assert f"CMD {json.dumps(image.CONFIG['Cmd'])}" in text and f"STOPSIGNAL {image.CONFIG['StopSignal']}" in text
    for setting in image.CONFIG["Env"]:
        assert setting.startswith(("PATH=", "SSL_CERT_FILE=")) or setting in text, setting


def copied(folder: Path, overwrites: bool) -> dict[str, tuple[int, int]]:
    """Owner and mode of each entry of the Dockerfile's image, of these files. BuildKit has root's 0755 for folders that it has to make to
    copy into; of a folder that is there it leaves owner and mode where it copies into it, and `overwrites` them where it meets it
    further below, which other builders do not."""
    made: dict[str, tuple[int, int]] = {}
    for chown, source, place in re.findall(
        r"^COPY --chown=(\d+):\1 (\S+)/ /(\S*)$", (CONTAINER / "Dockerfile").read_text(), re.M
    ):
        into = place.rstrip("/")
        for parent in [into, *map(str, Path(into).parents)]:
            if parent not in (".", ""):
                made.setdefault(parent, (int(chown), 0o755))
        for path in sorted((folder / source).rglob("*")):
            name = str(Path(into) / path.relative_to(folder / source))
            if name not in made or overwrites or not path.is_dir():
                made[name] = (int(chown), path.lstat().st_mode & 0o7777)
    return made


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_dockerfile_makes_what_the_image_has(tmp_path, mask):
    """Every file and folder has the owner and the mode that it has in the image's layers, whatever the umask is."""
    sys.path.insert(0, str(PACKAGING))
    import image

    base, program = tmp_path / "base", tmp_path / "program"
    before = os.umask(mask)
    try:
        image.make_skeleton(base)
        program.mkdir()
        # Any program: the test is about owners and modes.
        image.make_program(program, Path("/bin/true"))
        image.make_context([base, program], tmp_path / "root", tmp_path / "own")
    finally:
        os.umask(before)
    layers: dict[str, tuple[int, int]] = {}
    for part in (base, program):
        with tarfile.open(fileobj=io.BytesIO(image.layer(part, 0))) as packed:
            layers |= {entry.name: (entry.uid, entry.mode) for entry in packed.getmembers()}
    for overwrites in (True, False):
        assert copied(tmp_path, overwrites) == layers, f"overwrites: {overwrites}"
    assert layers["var/lib/penstock"] == (image.USER, 0o700) and layers["tmp"] == (0, 0o1777)


@pytest.mark.parametrize("admin", ["", OWN_KEY], ids=["usual", "own key"])
def test_the_image_s_health_needs_no_key(tmp_path, admin):
    """A gateway whose admin API has keys of its own is as healthy as another."""
    text = (CONTAINER / "Dockerfile").read_text()
    command = json.loads(re.search(r"^HEALTHCHECK .* CMD (.*)$", text, re.M)[1])
    command[0] = command[0].replace("/usr/bin/penstock", str(binary()))
    env = {"PATH": "/usr/bin:/bin", "PENSTOCK_CONFIG": str(tmp_path / "penstock.toml")}
    with serving(tmp_path, provider("m") + admin):
        assert "ok" in run(*command, env=env).stdout
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 1, "nobody serves any more"


def test_the_compose_file_names_what_is_there():
    compose = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
    services, config = compose["services"], tomllib.loads((CONTAINER / "compose" / "penstock.toml").read_text())
    gateway = services["gateway"]
    assert set(gateway["depends_on"]) == {"database", "counters"} < set(services)
    folder = gateway["volumes"][0].split(":")[0]
    assert (CONTAINER / folder / "penstock.toml").is_file()
    for secret in gateway["secrets"]:
        assert secret in compose["secrets"]
        assert f"/run/secrets/{secret}" in (config["store"]["password_file"], config["auth"]["pepper_file"])
    # Hosts of the URLs are services.
    for url in (config["store"]["url"], config["counters"]["url"]):
        assert urlsplit(url).hostname in services
    grace = re.search(r"^grace_ms = (\d+)", (ROOT / "configs/penstock.toml").read_text(), re.M)
    assert int(gateway["stop_grace_period"].rstrip("s")) * 1000 > int(grace[1])


def test_bash_reads_the_completions(tmp_path):
    script = tmp_path / "penstock"
    script.write_text(run(binary(), "completions", "bash").stdout)
    line = 'COMP_WORDS=(penstock se); COMP_CWORD=1; _penstock penstock se penstock; echo "${COMPREPLY[@]}"'
    assert run("bash", "-c", f". {script}; {line}").stdout.split() == ["serve"]


def test_every_command_has_a_page(tmp_path):
    run(binary(), "man", tmp_path)
    shown = run(binary(), "help").stdout.split("Commands:")[1].split("Options:")[0]
    commands = [line.split()[0] for line in shown.splitlines() if re.match(r"^  \w", line)]
    assert len(commands) > 12
    for command in commands:
        assert command == "help" or (tmp_path / f"penstock-{command}.1").is_file(), command


def third_party(what: str) -> str:
    return run(sys.executable, PACKAGING / "third_party.py", what).stdout


def test_the_bill_of_materials_is_whole():
    text = third_party("sbom")
    assert third_party("sbom") == text, "made twice, it is the same"
    bom = json.loads(text)
    refs = [component["bom-ref"] for component in bom["components"]]
    assert len(set(refs)) == len(refs) > 200
    known = {*refs, bom["metadata"]["component"]["bom-ref"]}
    assert {entry["ref"] for entry in bom["dependencies"]} == known
    assert {to for entry in bom["dependencies"] for to in entry["dependsOn"]} <= known
    # WebAssembly is in the packages, tests are not.
    names = {component["name"] for component in bom["components"]}
    assert {"wasmtime", "rustls", "penstock-engine"} <= names and not {"proptest", "rcgen"} & names
    for component in bom["components"]:
        foreign = not component["name"].startswith("penstock-")
        assert component["licenses"][0]["expression"], component["name"]
        assert not foreign or len(component["hashes"][0]["content"]) == 64, component["name"]


def test_licences_have_their_texts():
    text = third_party("licences")
    listed, texts = text.split("=" * 80, 1)
    for name in ("wasmtime", "rustls", "tokio", "ring", "libsqlite3-sys"):
        assert re.search(rf"^{name} \d", listed, re.M), name
    assert "Permission is hereby granted" in texts and "Apache License" in texts
    without = re.findall(r"^(\S+) .*no text comes with it", listed, re.M)
    assert len(without) < len(listed.splitlines()) / 10, without
