"""Packages, made from this build, in file systems of their own: the .deb and the tarball in a fresh Debian, the image alone."""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rooms import PACKAGING, ask, binary, chat, free_port, run, served_in, wait_until

pytestmark = pytest.mark.slow

RELEASE = "bookworm"


@pytest.fixture(scope="session")
def packages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(PACKAGING / "build.sh", binary(), folder, env=os.environ | {"PENSTOCK_PACK": "fast"})
    return folder


@pytest.fixture(scope="session")
def debian(tmp_path_factory) -> Path:
    """A tar of Debian with what is essential, and what the package depends on."""
    path = tmp_path_factory.mktemp("debian") / "root.tar"
    run("mmdebstrap", "--variant=essential", "--include=passwd,libgcc-s1", RELEASE, path)
    return path


@pytest.fixture
def root(debian, tmp_path) -> Path:
    """A fresh Debian of one test's own."""
    place = tmp_path / "root"
    place.mkdir()
    run("tar", "--extract", "--file", debian, "--directory", place, "--exclude=./dev/*")
    return place


def as_written(page: str, holds: str) -> list[str]:
    """Lines of the one block of a guide that holds these words."""
    text = (PACKAGING.parent / "docs" / "guide" / page).read_text()
    (block,) = [block for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) if holds in block]
    return block.splitlines()


def typed(root: Path, line: str, more: dict[str, str] | None = None) -> str:
    """What a line of a guide prints in that root; `sudo` is what the test does."""
    words = line.split()
    assert words.pop(0) == "sudo", line
    user = words[1] if words[0] == "-u" else "root"
    words = words[2:] if words[0] == "-u" else words
    script = 'root=$1 user=$2; shift 2; mount --bind /proc "$root/proc" && exec /usr/sbin/chroot --userspec="$user" "$root" "$@"'
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/", **(more or {})}
    return run(
        "unshare", "--mount", "--propagation", "private", "bash", "-c", script, "-", root, user, *words, env=env
    ).stdout


def unit_of_file(path: Path = PACKAGING / "systemd/penstock.service") -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(path)
    return parser["Service"]


@contextlib.contextmanager
def manager(place: Path) -> Iterator[Callable[[], dict[str, str]]]:
    """A service manager's socket; what is called returns the next message that says who is ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(place))
        place.chmod(0o777)
        listening.settimeout(60)

        def said() -> dict[str, str]:
            while True:
                lines = listening.recv(4096).decode().splitlines()
                if "READY=1" in lines:
                    return dict(line.split("=", 1) for line in lines)

        yield said


def inside(root: Path, *command) -> str:
    return run("chroot", root, *command, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}).stdout


def test_the_deb_is_installed_and_its_unit_serves(packages, root, tmp_path):
    (deb,) = packages.glob("*.deb")
    shutil.copy(deb, root / deb.name)
    install, check, create = as_written("install.md", "dpkg --install")
    typed(root, install)
    assert "penstock" in inside(root, "getent", "passwd", "penstock")
    assert run(root / "usr/bin/penstock", "version").stdout == run(binary(), "version").stdout
    shown = inside(root, "stat", "-c", "%U:%G %a", "/etc/penstock", "/etc/penstock/penstock.toml").split("\n")
    assert shown[:2] == ["root:penstock 750", "root:penstock 640"], "the service reads its config, others do not"

    # As systemd would: the unit's user, its environment, its folders, its command, and a socket for what the service says.
    service = unit_of_file(root / "usr/lib/systemd/system/penstock.service")
    for key, parent in (("StateDirectory", "var/lib"), ("CacheDirectory", "var/cache")):
        inside(root, "install", "-d", "-o", service["User"], "-m", service[f"{key}Mode"], f"/{parent}/{service[key]}")
    name, value = service["Environment"].split("=", 1)
    user = f"{service['User']}:{service['Group']}"
    assert "nothing is wrong" in typed(root, check)
    env = {name: value, "NOTIFY_SOCKET": "/run/notify"}
    with (
        manager(root / "run/notify") as said,
        served_in(root, tmp_path / "log", service["ExecStart"].split(), env, user) as served,
    ):
        assert said() == {"READY": "1", "MAINPID": str(served.process.pid)}
        assert chat(served.url)
        key = typed(root, create).strip()
        wait_until(lambda: ask(f"{served.url}/v1/models") is None, "nobody is served without the key", 30)
        assert chat(served.url, key)
        assert (root / "var/lib/penstock/gateway.lock").exists(), "state is where the config says"
        owner = (root / "var/lib/penstock/penstock.db").stat()
        assert owner.st_uid == int(inside(root, "id", "-u", "penstock")) and owner.st_mode & 0o077 == 0
        reload = service["ExecReload"].replace("$MAINPID", str(served.process.pid))
        assert typed(root, f"sudo -u penstock {reload}", env), "what systemctl reload does"
        # What the package's script does when a new version is installed over one that runs.
        (line,) = re.findall(
            r"runuser -u penstock -- env -i \S+ (.*?) </dev/null \|\|", (PACKAGING / "debian/postinst").read_text()
        )
        assert "serves" in typed(root, f"sudo -u penstock {line}")
        new = said()
        assert new["READY"] == "1" and int(new["MAINPID"]) != served.process.pid
        assert served.process.wait(60) == 0, "the old process ends with its last answer"
        assert chat(served.url, key)
        os.kill(int(new["MAINPID"]), signal.SIGTERM)
        wait_until(lambda: not Path("/proc", new["MAINPID"]).exists(), "the new process ends", 60)

    config = root / "etc/penstock/penstock.toml"
    config.write_text(config.read_text() + "\n# mine\n")
    typed(root, install)
    assert config.read_text().endswith("# mine\n"), "a config that was changed stays"
    inside(root, "dpkg", "--purge", "penstock")
    left = [
        place
        for place in ("usr/bin/penstock", "var/lib/penstock", "etc/penstock/penstock.toml")
        if (root / place).exists()
    ]
    assert left == []


def allowed_calls(service: configparser.SectionProxy) -> set[str]:
    """System calls that the unit's filter lets through, by systemd's own lists."""

    def members(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        lines = run("systemd-analyze", "syscall-filter", name).stdout.splitlines()[1:]
        words = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        return set().union(*(members(word) for word in words))

    # The parser keeps the last of a key's lines; the file has both.
    lines = re.findall(r"^SystemCallFilter=(\S+)$", (PACKAGING / "systemd/penstock.service").read_text(), re.M)
    assert [line[0] for line in lines] == ["@", "~"] and service["SystemCallArchitectures"] == "native"
    return (members(lines[0]) | members("@default")) - (members(lines[1][1:]) - members("@default"))


def test_the_filter_lets_through_what_the_program_calls(packages, tmp_path):
    """A gateway, its worker and an answer under strace: every system call is one that the unit allows."""
    (archive,) = packages.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (program,) = (tmp_path / "unpacked").glob("*/bin/penstock")
    port, trace = free_port(), tmp_path / "trace"
    command = [
        program,
        "serve",
        "--state-dir",
        tmp_path / "state",
        "--workers",
        "2",
        "--listen",
        f"127.0.0.1:{port}",
        "--admin",
        "127.0.0.1:0",
    ]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(["strace", "-f", "-qq", "-o", trace, *command], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: ask(f"{url}/ready"), "the gateway is ready", 240)
        assert chat(url)
    finally:
        lines = trace.read_text(errors="replace").splitlines()
        os.kill(int(lines[0].split()[0]), signal.SIGTERM)
        process.wait(120)
    called = {
        found[1]
        for line in trace.read_text(errors="replace").splitlines()
        if (found := re.match(r"\d+ +(\w+)\(", line))
    }
    assert {"accept4", "clone3", "execve", "sched_setaffinity"} <= called, "the trace has gateway and workers"
    allowed = allowed_calls(unit_of_file())
    # SQLite gives its files away where it is root, which the service is not.
    assert called - allowed - {"fchown"} == set()
    # Memory between workers, and the state of matrix tiles, which not every processor has.
    assert {"memfd_create", "fcntl", "arch_prctl"} <= allowed and "mount" not in allowed


def test_the_deb_has_what_belongs_to_a_program(packages):
    (deb,) = packages.glob("*.deb")
    listed = run("dpkg-deb", "--contents", deb).stdout
    for place in (
        "./usr/bin/penstock",
        "./usr/lib/systemd/system/penstock.service",
        "./usr/share/man/man1/penstock-serve.1.gz",
        "./usr/share/bash-completion/completions/penstock",
        "./usr/share/zsh/vendor-completions/_penstock",
        "./usr/share/fish/vendor_completions.d/penstock.fish",
        "./usr/share/doc/penstock/copyright",
        "./usr/share/doc/penstock/THIRD-PARTY.txt.gz",
    ):
        assert re.search(rf"root/root .* {re.escape(place)}$", listed, re.M), place
    needs = run("dpkg-deb", "--field", deb, "Depends").stdout
    floor = re.search(r"libc6 \(>= ([\d.]+)\)", needs)[1]
    asked = set(re.findall(r"GLIBC_([\d.]+)", run("readelf", "--version-info", "--wide", binary()).stdout))
    assert max(asked, key=lambda version: [int(part) for part in version.split(".")]) == floor


def test_the_tarball_serves_where_it_is_unpacked(packages, root, tmp_path):
    (archive,) = packages.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(root / "opt", filter="data")
    (folder,) = (root / "opt").iterdir()
    assert "/usr/local/bin/penstock serve" in (folder / "lib/systemd/system/penstock.service").read_text()
    inside(root, "install", "-d", "-o", "nobody", "/srv/state")
    command = [f"/opt/{folder.name}/bin/penstock", "serve", "--state-dir", "/srv/state", "--admin", "off"]
    with served_in(root, tmp_path / "log", command, {}, "nobody:nogroup") as served:
        assert chat(served.url)


def test_checksums_are_of_the_files(packages):
    run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=packages)
    named = {line.split()[1] for line in (packages / "SHA256SUMS").read_text().splitlines()}
    assert named == {path.name for path in packages.iterdir()} - {"SHA256SUMS"}


def test_packages_are_the_same_when_they_are_made_again(packages, tmp_path):
    run(PACKAGING / "build.sh", binary(), tmp_path, env=os.environ | {"PENSTOCK_PACK": "fast"})
    assert (tmp_path / "SHA256SUMS").read_text() == (packages / "SHA256SUMS").read_text()


@pytest.fixture(scope="session")
def image(tmp_path_factory) -> Path:
    """Folder with the image's layout."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  another\n")
    made = [sys.executable, PACKAGING / "image.py", binary(), folder, "--layout", folder / "layout"]
    run(*made, "--debian", folder / "debian")
    return folder


def blob(layout: Path, entry: dict) -> bytes:
    data = (layout / "blobs" / entry["digest"].replace(":", "/")).read_bytes()
    assert f"sha256:{hashlib.sha256(data).hexdigest()}" == entry["digest"] and len(data) == entry["size"]
    return data


def test_the_image_serves_without_root_and_with_nothing_else(image, tmp_path):
    layout = image / "layout"
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(blob(layout, entry))
    config = json.loads(blob(layout, manifest["config"]))["config"]
    for part in manifest["layers"]:
        blob(layout, part)
    # What Docker's own store reads says the same, and the checksums name the archive.
    (legacy,) = json.loads((layout / "manifest.json").read_text())
    parts = [legacy["Config"], *legacy["Layers"]]
    assert parts == [f"blobs/{part['digest'].replace(':', '/')}" for part in (manifest["config"], *manifest["layers"])]
    other, ours = (image / "SHA256SUMS").read_text().splitlines()
    (archive,) = image.glob("*.oci.tar")
    assert other.endswith("another") and ours == f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}"
    # Unpacked by a program that is not ours.
    tag = entry["annotations"]["org.opencontainers.image.ref.name"]
    run("umoci", "unpack", "--image", f"{layout}:{tag}", tmp_path / "bundle")
    root = tmp_path / "bundle" / "rootfs"
    programs = [
        path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and os.access(path, os.X_OK)
    ]
    foreign = [path for path in programs if ".so" not in path.name and path != root / "usr/bin/penstock"]
    assert foreign == [], "no shell and no other program"
    assert "BEGIN CERTIFICATE" in (root / "etc/ssl/certs/ca-certificates.crt").read_text()
    assert (root / "usr/share/zoneinfo/Europe/Berlin").is_file()
    copyrights = {path.parent.name for path in root.glob("usr/share/doc/*/copyright")}
    assert {"libc6", "libgcc-s1", "ca-certificates", "tzdata", "penstock"} <= copyrights
    env = dict(setting.split("=", 1) for setting in config["Env"])
    command = [*config["Entrypoint"], *config["Cmd"]]
    with served_in(root, tmp_path / "log", command, env, config["User"]) as served:
        # Beyond loopback, as the image's config says, nobody is served without a key: here the test's address is loopback.
        assert chat(served.url)
        assert (root / "var/lib/penstock/penstock.db").stat().st_uid == int(config["User"].split(":")[0])
        health = re.search(r"^HEALTHCHECK .* CMD (.*)$", (PACKAGING / "container/Dockerfile").read_text(), re.M)
        assert typed(root, f"sudo -u {config['User']} {' '.join(json.loads(health[1]))}", env)


def test_the_image_is_the_same_when_it_is_made_again(image, tmp_path):
    again = [sys.executable, PACKAGING / "image.py", binary(), tmp_path, "--layout", tmp_path / "layout"]
    run(*again, "--debian", image / "debian", "--root", tmp_path / "root")
    assert (tmp_path / "layout/index.json").read_text() == (image / "layout/index.json").read_text()
    assert (tmp_path / "root/usr/bin/penstock").is_file() and (tmp_path / "root/etc/passwd").is_file()
