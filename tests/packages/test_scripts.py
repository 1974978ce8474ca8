"""The scripts of the Debian package, as dpkg calls them, with a stand-in for systemd: what the service is after each step."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from rooms import PACKAGING

# A service manager of one unit: what is enabled and active are files, and every call is noted. With `broken` no start succeeds.
SYSTEMCTL = """#!/bin/sh
echo "$@" >>"$STAND/calls"
case "$*" in
daemon-reload) ;;
"is-active --quiet penstock") [ -e "$STAND/active" ] ;;
"is-enabled --quiet penstock") [ -e "$STAND/enabled" ] ;;
"enable --now penstock") touch "$STAND/enabled"; [ ! -e "$STAND/broken" ] && touch "$STAND/active" ;;
"start penstock") [ ! -e "$STAND/broken" ] && touch "$STAND/active" ;;
"stop penstock") rm -f "$STAND/active" ;;
"disable --now penstock") rm -f "$STAND/active" "$STAND/enabled" ;;
*) echo "not a command of the stand-in: $*" >&2; exit 64 ;;
esac
"""
VERSION = "0.1.0"


class Machine:
    """A machine's folders and service manager, on which dpkg runs the scripts."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.wants = folder / "etc/systemd/system/multi-user.target.wants"
        programs = folder / "bin"
        for made in (programs, self.wants, folder / "run/systemd/system", folder / "var/lib/penstock"):
            made.mkdir(parents=True)
        stand_ins = {"systemctl": SYSTEMCTL, "setsid": '#!/bin/sh\necho "setsid $*" >>"$STAND/calls"\n'}
        for name in ("getent", "useradd", "chgrp"):
            stand_ins[name] = "#!/bin/sh\n"
        for name, text in stand_ins.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        # What systemd's enable makes is a link; the stand-in has a file beside it.
        self.enabled = self.wants / "penstock.service"
        (folder / "enabled").symlink_to(self.enabled)

    def runs(self, script: str, *words: str) -> str:
        """Runs a script of the package with this machine's folders in the place of the system's; returns what it says."""
        text = (PACKAGING / "debian" / script).read_text()
        for place in ("/run/systemd", "/etc/penstock", "/etc/systemd", "/var/"):
            text = text.replace(f" {place}", f" {self.folder}{place}")
        env = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "STAND": str(self.folder)}
        command = ["/bin/sh", "-c", text, script, *words]
        done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done
        return done.stdout + done.stderr

    # The orders of dpkg, by Debian's policy, chapter 6: a package whose config is still there is configured with its last version.
    def install(self, last: str = "") -> str:
        (self.folder / "etc/penstock").mkdir(exist_ok=True)
        return self.runs("postinst", "configure", last)

    def upgrade(self) -> str:
        return self.runs("prerm", "upgrade", VERSION) + self.runs("postrm", "upgrade", VERSION) + self.install(VERSION)

    def remove(self) -> None:
        self.runs("prerm", "remove")
        self.runs("postrm", "remove")

    def state(self) -> tuple[bool, bool]:
        """Whether the service starts with the machine, and whether it runs."""
        return self.enabled.exists(), (self.folder / "active").exists()

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_a_service_that_is_removed_and_installed_again_serves_again(machine):
    machine.install()
    assert machine.state() == (True, True)
    machine.remove()
    assert machine.state() == (True, False)
    assert machine.install(VERSION) == ""
    assert machine.state() == (True, True)


def test_purge_leaves_nothing_of_the_service(machine):
    machine.install()
    machine.remove()
    machine.runs("postrm", "purge")
    assert machine.state() == (False, False)
    assert not (machine.folder / "var/lib/penstock").exists() and machine.wants.exists()
    assert machine.calls()[-1] == "daemon-reload"
    machine.install()
    assert machine.state() == (True, True)


def test_a_version_starts_the_service_that_had_failed(machine):
    (machine.folder / "broken").touch()
    assert "not started" in machine.install()
    assert "not started" in machine.upgrade()
    (machine.folder / "broken").unlink()
    assert machine.state() == (True, False)
    assert machine.upgrade() == ""
    assert machine.state() == (True, True)


def test_a_running_service_hands_over(machine):
    machine.install()
    machine.upgrade()
    (handed,) = [call for call in machine.calls() if call.startswith("setsid")]
    assert "/usr/bin/penstock upgrade --config" in handed and "stop penstock" not in machine.calls()
    assert machine.state() == (True, True)


def test_what_an_administrator_has_disabled_stays_off(machine):
    machine.install()
    machine.enabled.unlink()
    (machine.folder / "active").unlink()
    machine.upgrade()
    machine.remove()
    machine.install(VERSION)
    assert machine.state() == (False, False)


def test_without_systemd_the_scripts_touch_no_service(machine):
    os.rmdir(machine.folder / "run/systemd/system")
    machine.install()
    machine.remove()
    machine.runs("postrm", "purge")
    assert not (machine.folder / "calls").exists()
