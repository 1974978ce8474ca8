"""The systemd unit: accepted by systemd, closed as far as it says, and with the paths that packages have."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from rooms import OWN_KEY, PACKAGING, Served, ask, binary, migration_seconds, provider, run, serving, wait_until

NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}
UNIT = PACKAGING / "systemd" / "penstock.service"
# Tenths, on systemd's scale from 0 (closed) to 10 (open).
EXPOSURE_MAX = 20


def unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(UNIT)
    return parser["Service"]


def test_systemd_accepts_the_unit(tmp_path):
    # With this build in the place of the package's.
    copy = tmp_path / "penstock.service"
    copy.write_text(UNIT.read_text().replace("/usr/bin/penstock", str(binary())))
    done = run("systemd-analyze", "verify", "--man=no", copy)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "penstock" in line]
    assert ours == []


def test_the_unit_is_closed():
    done = run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", UNIT)
    level = float(re.search(r"exposure level for penstock.service: ([\d.]+)", done.stdout)[1])
    assert level * 10 <= EXPOSURE_MAX


def test_what_the_product_needs_stays_open():
    service = unit()
    # Plugins in WebAssembly become machine code; memory and cores are read from /proc; workers that run out of memory are replaced.
    assert "MemoryDenyWriteExecute" not in service and "ProcSubset" not in service
    assert service["OOMPolicy"] == "continue" and service["KillMode"] == "mixed"
    # A new process tells systemd that it is the main one (docs/guide/upgrades.md).
    assert service["Type"] == "notify" and service["NotifyAccess"] == "all"
    config = (PACKAGING / "penstock.toml").read_text()
    assert f'state_dir = "/var/lib/{service["StateDirectory"]}"' in config


def test_the_unit_waits_for_a_migration():
    minutes = int(re.fullmatch(r"(\d+)min", unit()["TimeoutStartSec"])[1])
    assert minutes * 60 >= migration_seconds() + 120


def test_one_line_of_a_drop_in_shows_devices():
    """Any rule for devices closes those that it does not name, and ProtectClock= makes one."""
    service = unit()
    assert service["PrivateDevices"] == "true"
    assert [key for key in ("DeviceAllow", "DevicePolicy", "ProtectClock") if key in service] == []
    # What it would add is there: no capability for a clock, no system call that sets one.
    assert service["CapabilityBoundingSet"] == "" and "~@privileged" in UNIT.read_text()
    guide = (PACKAGING.parent / "docs" / "guide" / "gpu.md").read_text()
    (drop_in,) = re.findall(r"^    \[Service\]\n((?:    .*\n)+)", guide, re.M)
    lines = [line.strip() for line in drop_in.splitlines()]
    # The setuid helper of NVIDIA's library makes the device files; NoNewPrivileges= takes its rights, so root's part of the start calls it.
    assert lines == ["PrivateDevices=false", "ExecStartPre=+-/usr/bin/nvidia-modprobe -c0 -u"]
    assert service["NoNewPrivileges"] == "true"


def reload(gateway: Served, folder: Path) -> subprocess.CompletedProcess:
    """What systemctl reload does."""
    command = unit()["ExecReload"].replace("/usr/bin/penstock", str(binary())).split()
    words = [str(gateway.process.pid) if word == "$MAINPID" else word for word in command]
    env = {"PATH": "/usr/bin:/bin", "PENSTOCK_CONFIG": str(folder / "penstock.toml")}
    return subprocess.run(words, env=env, check=False, capture_output=True, text=True, timeout=60)


def models(gateway: Served) -> list[str]:
    return [model["id"] for model in json.loads(ask(f"{gateway.url}/v1/models") or b'{"data": []}')["data"]]


@pytest.mark.parametrize("admin", ["", OWN_KEY, '[admin]\nlisten = "off"\n'], ids=["usual", "own key", "off"])
def test_a_reload_is_done_whatever_the_admin_api_asks_for(tmp_path, admin):
    config = tmp_path / "penstock.toml"
    with serving(tmp_path, provider("m") + admin) as gateway:
        assert models(gateway) == ["m"]
        text = config.read_text()
        config.write_text(text.replace('["m"]', '["m", "n"]'))
        done = reload(gateway, tmp_path)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: models(gateway) == ["m", "n"], "the config is read again", 30)
        config.write_text(text + "[nonsense]\n")
        done = reload(gateway, tmp_path)
        assert done.returncode != 0 and "nonsense" in done.stderr, done
        assert models(gateway) == ["m", "n"]
        # A variable that only the gateway misses: it says so itself, in the answer or, without the admin API, in its log.
        config.write_text(text.replace('id = "up"\n', 'id = "up"\nkey_env = "NOT_THERE"\n'))
        done = reload(gateway, tmp_path)
        assert (done.returncode == 0) == bool(admin), done
        wait_until(lambda: "NOT_THERE" in done.stderr + gateway.text(), "the fault is told", 30)
        assert models(gateway) == ["m", "n"]


def test_sockets_of_other_units_outlast_a_restart():
    service = unit()
    assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("penstock", "yes")
    guide = (PACKAGING.parent / "docs" / "guide" / "replicas.md").read_text()
    assert f"/run/{service['RuntimeDirectory']}/" in guide, "where the guide's workers listen"


def usable_by_nobody() -> bool:
    """Whether this test may become another user, who can run the binary."""
    if os.geteuid() != 0:
        return False
    try:
        done = subprocess.run([binary(), "version"], check=False, capture_output=True, **NOBODY)
    except OSError:
        return False
    return done.returncode == 0


def test_a_drop_in_lets_the_service_write_its_config():
    """With the owners that the package gives, and then with those that the guide says."""
    if not usable_by_nobody():
        pytest.skip("needs root, and a binary that others can run")
    guide = (PACKAGING.parent / "docs" / "guide" / "install.md").read_text()
    (row,) = re.findall(r"^\| `server.config_writes` \| (.*) \|$", guide, re.M)
    assert "`ReadWritePaths=/etc/penstock`" in row
    (command,) = re.findall(r"`sudo (chown \S+ .*?)`", row)
    # Not below pytest's folder, which is for root alone.
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        etc, state = folder / "etc", folder / "state"
        for made, owner, mode in ((etc, 0, 0o750), (state, NOBODY["user"], 0o700)):
            made.mkdir()
            os.chown(made, owner, NOBODY["group"])
            made.chmod(mode)
        text = provider("m").replace("[server]\n", "[server]\nconfig_writes = true\n")
        with serving(etc, text, state=state, **NOBODY) as gateway:
            config, new = etc / "penstock.toml", folder / "new.toml"
            os.chown(config, 0, NOBODY["group"])
            config.chmod(0o640)
            new.write_text(config.read_text().replace('["m"]', '["m", "n"]'))
            apply = [binary(), "admin", "--state-dir", state, "config", "apply", new]
            refused = subprocess.run(apply, check=False, capture_output=True, text=True, **NOBODY)
            assert refused.returncode != 0 and "ermission denied" in refused.stderr, refused
            run(*command.replace("penstock", str(NOBODY["user"]), 1).replace("/etc/penstock", str(etc)).split())
            run(*apply, **NOBODY)
            assert models(gateway) == ["m", "n"] and config.read_text() == new.read_text()


def test_the_unit_waits_longer_than_answers_may_take():
    said = run(binary(), "admin", "config", "reload", "--help").stdout
    assert "--or-hangup <PID>" in said, "the command of ExecReload"
    assert unit()["ExecReload"] == "/usr/bin/penstock admin config reload --or-hangup $MAINPID"
    default = re.search(r"^grace_ms = (\d+)$", (PACKAGING.parent / "configs" / "penstock.toml").read_text(), re.M)
    assert int(unit()["TimeoutStopSec"]) * 1000 > int(default[1]) + 5000
