#!/usr/bin/env python3
"""What is linked into penstock: a bill of materials (CycloneDX 1.5) and the licence texts, from `cargo metadata`.

    packaging/third_party.py sbom > penstock.cdx.json
    packaging/third_party.py licences > THIRD-PARTY.txt

Crates are those that the binary can link with the features of packages on x86-64 Linux, procedural macros included. Nothing is fetched but what
a build fetches; the output depends on Cargo.lock and the crates' sources alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = "x86_64-unknown-linux-gnu"
FEATURES = "penstock/wasm"
# Files of a crate that hold licences: LICENSE-MIT, LICENCE.txt, COPYING, NOTICE, UNLICENSE.
TEXTS = re.compile(r"^(licen[cs]e|copying|notice|unlicense|copyright)", re.IGNORECASE)
# No licence is longer; a larger file of such a name is something else.
TEXT_BYTES_MAX = 200_000


def metadata() -> dict:
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--features", FEATURES]
    done = subprocess.run([*command, "--filter-platform", TARGET], cwd=ROOT, check=True, capture_output=True)
    return json.loads(done.stdout)


def linked(tree: dict) -> tuple[dict, dict[str, dict], dict[str, list[str]]]:
    """The binary's package, the packages below it by id, and for each of all of them the ids that it links."""
    packages = {package["id"]: package for package in tree["packages"]}
    nodes = {node["id"]: node for node in tree["resolve"]["nodes"]}
    binary = next(package for package in tree["packages"] if package["name"] == "penstock")
    edges: dict[str, list[str]] = {}
    waiting = [binary["id"]]
    while waiting:
        at = waiting.pop()
        if at in edges:
            continue
        normal = [dep for dep in nodes[at]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
        edges[at] = sorted(dep["pkg"] for dep in normal)
        waiting += edges[at]
    return binary, {at: packages[at] for at in edges if at != binary["id"]}, edges


def checksums() -> dict[tuple[str, str], str]:
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    return {(entry["name"], entry["version"]): entry.get("checksum", "") for entry in lock["package"]}


def purl(package: dict) -> str:
    return f"pkg:cargo/{package['name']}@{package['version']}"


def expression(package: dict) -> str:
    """SPDX expression; `/` is the old way to write OR."""
    return (package.get("license") or "").replace("/", " OR ")


def component(package: dict, sums: dict) -> dict:
    found = {"type": "library", "bom-ref": purl(package), "name": package["name"], "version": package["version"]}
    found["purl"] = purl(package)
    if expression(package):
        found["licenses"] = [{"expression": expression(package)}]
    if checksum := sums.get((package["name"], package["version"])):
        found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if (package.get("repository") or "").startswith("http"):
        found["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return found


def sbom() -> str:
    binary, below, edges = linked(metadata())
    sums, names = checksums(), {binary["id"]: purl(binary)} | {at: purl(package) for at, package in below.items()}
    lock = (ROOT / "Cargo.lock").read_bytes()
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # Of the lock file: one build, one number, however often it is made.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, lock.hex())}",
        "version": 1,
        "metadata": {"component": component(binary, sums) | {"type": "application"}},
        "components": [component(package, sums) for package in sorted(below.values(), key=purl)],
        "dependencies": [
            {"ref": names[at], "dependsOn": [names[to] for to in edges[at]]} for at in sorted(edges, key=names.get)
        ],
    }
    return json.dumps(bom, indent=1) + "\n"


def texts_of(package: dict) -> list[str]:
    """Licence texts in a crate's folder, and of what it carries along (`vendor/…/LICENSE`)."""
    folder = Path(package["manifest_path"]).parent
    files = [path for path in sorted(folder.rglob("*")) if TEXTS.match(path.name) and path.is_file()]
    texts = [path.read_text(errors="replace") for path in files if path.stat().st_size <= TEXT_BYTES_MAX]
    # Sources of such a name (license.rs) are no texts.
    is_source = [path.suffix in (".rs", ".c", ".h", ".py", ".js", ".toml", ".json", ".sh") for path in files]
    kept = [text for text, source in zip(texts, is_source, strict=False) if not source]
    return ["\n".join(line.rstrip() for line in text.strip().splitlines()) for text in kept]


def licences() -> str:
    """One section per text, with the crates that it came with; first the list of crates with their expressions."""
    _, below, _ = linked(metadata())
    foreign = sorted((package for package in below.values() if package["source"]), key=purl)
    users: dict[str, list[str]] = {}
    out = ["Software of others that is linked into penstock, under the licences named here.", ""]
    for package in foreign:
        name = f"{package['name']} {package['version']}"
        texts = texts_of(package)
        for text in dict.fromkeys(texts):
            users.setdefault(text, []).append(name)
        where = "" if texts else f"; no text comes with it: {package.get('repository') or 'no address'}"
        out.append(f"{name}: {expression(package) or 'see its text'}{where}")
    out += ["", "The standard library of Rust: MIT OR Apache-2.0; https://github.com/rust-lang/rust"]
    for text, names in users.items():
        out += ["", "=" * 80, ", ".join(names), "-" * 80, text]
    return "\n".join(out) + "\n"


def main() -> None:
    made = {"sbom": sbom, "licences": licences}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=made)
    sys.stdout.write(made[parser.parse_args().what]())


if __name__ == "__main__":
    main()
