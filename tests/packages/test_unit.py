"""The systemd unit: accepted by systemd, closed as far as it says, and with the paths that packages have."""

from __future__ import annotations

import configparser
import re

from rooms import PACKAGING, binary, run

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


def test_the_unit_waits_longer_than_answers_may_take():
    said = run(binary(), "admin", "config", "reload", "--help").stdout
    assert "reload" in said.lower(), "the command of ExecReload"
    assert unit()["ExecReload"] == "/usr/bin/penstock admin config reload"
    default = re.search(r"^grace_ms = (\d+)$", (PACKAGING.parent / "configs" / "penstock.toml").read_text(), re.M)
    assert int(unit()["TimeoutStopSec"]) * 1000 > int(default[1]) + 5000
