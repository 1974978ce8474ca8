#!/usr/bin/env python3
"""Container image of penstock from scratch: our binary, and of Debian libc6, libgcc-s1, ca-certificates and tzdata. No shell, no package manager.

    packaging/image.py BINARY FOLDER              FOLDER/penstock-VERSION-ARCHITECTURE.oci.tar, for docker load, podman load, skopeo
    packaging/image.py BINARY FOLDER --layout DIR and the image's layout, unpacked
    packaging/image.py BINARY FOLDER --root DIR   and the root as a folder, for container/Dockerfile; what is the user's is in FOLDER/own

Debian's packages come by apt-get download, in the versions of this machine's lists; --debian DIR takes .deb files that are there. The same
packages and the same binary give the same image. Two layers: Debian's part, which seldom changes, and ours.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("libc6", "libgcc-s1", "ca-certificates", "tzdata")
# As in images that are called nonroot elsewhere; a number, so that Kubernetes can tell that it is not root.
USER = 65532
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# What belongs to the user, and with which mode.
OWN = {"var/lib/penstock": 0o700, "var/cache/penstock": 0o700}
# Modes of other entries that are neither a program's (0755) nor a file's (0644).
MODES = {"tmp": 0o1777}
# Left out of Debian's packages: conversions of character sets that no program here asks for, documents but the licences, packaging.
LEFT_OUT = ("usr/lib/*/gconv", "usr/share/lintian", "usr/share/man", "usr/share/zoneinfo/right", "usr/sbin", "usr/share/doc-base", "etc/ld.so.conf.d")  # fmt: skip
CONFIG = {
    "User": f"{USER}:{USER}",
    "ExposedPorts": {"8080/tcp": {}},
    "Env": [
        "PATH=/usr/bin",
        "PENSTOCK_CONFIG=/etc/penstock/penstock.toml",
        "HOME=/var/lib/penstock",
        "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
    ],
    "Entrypoint": ["/usr/bin/penstock"],
    "Cmd": ["serve"],
    "Volumes": {"/var/lib/penstock": {}},
    "WorkingDir": "/var/lib/penstock",
    "StopSignal": "SIGTERM",
}


def run(*command: str | Path, **more) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, **more).stdout


def fetched(name: str, folder: Path) -> Path:
    """The package's file in that folder, fetched where it is missing."""
    if not list(folder.glob(f"{name}_*.deb")):
        # The user of downloads cannot write to every folder.
        run("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", name, cwd=folder)
    return sorted(folder.glob(f"{name}_*.deb"))[-1]


def debian_files(folder: Path) -> list[Path]:
    """The packages as files, and the one that holds the licence of libgcc-s1 (gcc-12-base), which has nothing else."""
    files = [fetched(name, folder) for name in PACKAGES]
    needs = run("dpkg-deb", "--field", files[PACKAGES.index("libgcc-s1")], "Depends")
    return files + [fetched(name, folder) for name in re.findall(r"gcc-\d+-base", needs)]


def make_base(root: Path, packages: list[Path]) -> None:
    """Debian's part of the root."""
    for package in packages:
        run("dpkg-deb", "-x", package, root)
    for pattern in LEFT_OUT:
        for path in root.glob(pattern):
            shutil.rmtree(path)
    for path in root.glob("usr/share/doc/*/*"):
        # One folder may be a link to another, so that a file is met twice.
        if path.name != "copyright" and path.is_dir():
            shutil.rmtree(path)
        elif path.name != "copyright":
            path.unlink(missing_ok=True)
    certificates = sorted(root.glob("usr/share/ca-certificates/mozilla/*.crt"))
    if not certificates:
        raise SystemExit("image: ca-certificates has no certificates")
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(path.read_text() for path in certificates))
    make_skeleton(root)


def make_skeleton(root: Path) -> None:
    """Users, and folders that are empty or mounted over."""
    (root / "etc").mkdir(parents=True, exist_ok=True)
    for path, text in {
        "etc/passwd": f"root:x:0:0::/:/nologin\npenstock:x:{USER}:{USER}::/var/lib/penstock:/nologin\n",
        "etc/group": f"root:x:0:\npenstock:x:{USER}:\n",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }.items():
        (root / path).write_text(text)
    for name in ("tmp", "proc", "sys", "dev", "run", "etc/penstock"):
        (root / name).mkdir(parents=True, exist_ok=True)


def make_program(root: Path, binary: Path) -> None:
    """Our part of the root."""
    program = root / "usr/bin/penstock"
    program.parent.mkdir(parents=True)
    run("strip", "--strip-debug", "-o", program, binary)
    program.chmod(0o755)
    for source, place in {
        "packaging/container/penstock.toml": "etc/penstock/penstock.toml",
        "LICENSE": "usr/share/doc/penstock/copyright",
        "configs/penstock.toml": "usr/share/doc/penstock/penstock.toml",
    }.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, root / place)
    licences = run("python3", ROOT / "packaging/third_party.py", "licences")
    (root / "usr/share/doc/penstock/THIRD-PARTY.txt").write_text(licences)
    for folder in OWN:
        (root / folder).mkdir(parents=True)


def mode(name: str, runs: bool) -> int:
    """Mode of an entry of the image; `runs`: it is a folder, or somebody may execute it."""
    return {**MODES, **OWN}.get(name, 0o755 if runs else 0o644)


def make_context(parts: list[Path], root: Path, own: Path) -> None:
    """What the Dockerfile copies: `root` as root's, and the folders below `own` as the user's. COPY gives an entry that it makes the mode of its
    source, and leaves a folder that is there as it is; so a folder is in one of the two alone, with the image's mode."""
    root.mkdir(parents=True)
    for part in parts:
        shutil.copytree(part, root, symlinks=True, dirs_exist_ok=True)
    for name in OWN:
        (root / name).rmdir()
        place = own / Path(name).relative_to("var")
        place.mkdir(parents=True)
        place.chmod(mode(name, True))
    for path in root.rglob("*"):
        if not path.is_symlink():
            path.chmod(mode(str(path.relative_to(root)), path.is_dir() or bool(path.stat().st_mode & 0o111)))


def layer(root: Path, epoch: int) -> bytes:
    """Uncompressed tar of a root: sorted, one time, numbers for owners."""

    def settle(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        name = entry.name.removeprefix("./")
        entry.uid = entry.gid = USER if name in OWN else 0
        entry.uname = entry.gname = ""
        entry.mtime = epoch
        entry.mode = mode(name, entry.isdir() or bool(entry.mode & 0o111))
        return entry

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(root)), recursive=False, filter=settle)
    return out.getvalue()


class Layout:
    """An OCI image layout: blobs by their digest, and an index."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def blob(self, data: bytes, kind: str) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def image(self, layers: list[tuple[str, bytes]], architecture: str, version: str, created: str) -> None:
        config = {
            "created": created,
            "architecture": architecture,
            "os": "linux",
            "config": CONFIG | {"Labels": labels(version)},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}" for _, data in layers],
            },
            "history": [{"created": created, "created_by": by} for by, _ in layers],
        }
        packed = [self.blob(gzip.compress(data, 6, mtime=0), "layer.v1.tar+gzip") for _, data in layers]
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": packed,
            "annotations": labels(version),
        }
        entry = self.blob(json.dumps(manifest).encode(), "manifest.v1+json")
        names = {"org.opencontainers.image.ref.name": version, "io.containerd.image.name": f"penstock:{version}"}
        entry |= {"annotations": names, "platform": {"architecture": architecture, "os": "linux"}}
        index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [entry]}
        (self.folder / "index.json").write_text(json.dumps(index))
        # What Docker's own image store reads; others read the index.
        config_at, *layers_at = ["blobs/" + blob["digest"].replace(":", "/") for blob in (manifest["config"], *packed)]
        legacy = {"Config": config_at, "RepoTags": [f"penstock:{version}"], "Layers": layers_at}
        (self.folder / "manifest.json").write_text(json.dumps([legacy]))


def labels(version: str) -> dict[str, str]:
    about = {"title": "penstock", "version": version, "licenses": "Apache-2.0"}
    about["description"] = "AI gateway with its own inference engine"
    return {f"org.opencontainers.image.{name}": value for name, value in about.items()}


def note_checksum(file: Path) -> None:
    """Adds the file to the checksums beside it, where there are some: those of the other packages."""
    sums = file.parent / "SHA256SUMS"
    if sums.exists():
        others = [line for line in sums.read_text().splitlines() if line.split()[1] != file.name]
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        sums.write_text("".join(f"{line}\n" for line in [*others, f"{digest}  {file.name}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", type=Path, help="folder for the unpacked layout; must not exist")
    parser.add_argument("--root", type=Path, help="folder for the root; must not exist")
    parser.add_argument("--debian", type=Path, help="folder with Debian's packages, where missing ones are put too")
    asked = parser.parse_args()
    binary = asked.binary.resolve()
    version = run(binary, "version").split()[1]
    architecture = ARCHITECTURES[os.uname().machine]
    commit = ["git", "-C", ROOT, "log", "-1", "--format=%ct"]
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run(*commit))
    created = run("date", "-u", "-d", f"@{epoch}", "+%Y-%m-%dT%H:%M:%SZ").strip()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        base, program, debian = (Path(scratch) / name for name in ("base", "program", "debian"))
        base.mkdir(), program.mkdir(), debian.mkdir()
        if asked.debian:
            asked.debian.mkdir(parents=True, exist_ok=True)
        packages = debian_files(asked.debian or debian)
        make_base(base, packages)
        make_program(program, binary)
        names = " ".join(path.stem for path in packages)
        layers = [(f"Debian: {names}", layer(base, epoch)), (f"penstock {version}", layer(program, epoch))]
        layout = asked.layout or Path(scratch) / "layout"
        Layout(layout).image(layers, architecture, version, created)
        if asked.root:
            own = asked.folder / "own"
            shutil.rmtree(own, ignore_errors=True)
            make_context([base, program], asked.root, own)
        packed = asked.folder / f"penstock-{version}-{architecture}.oci.tar"
        with tarfile.open(packed, "w") as archive:
            for path in sorted(layout.rglob("*")):
                archive.add(path, arcname=str(path.relative_to(layout)), recursive=False)
    note_checksum(packed)
    print(f"{packed}: {packed.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
