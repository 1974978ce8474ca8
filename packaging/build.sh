#!/usr/bin/env bash
# Makes the packages of one built binary: .deb, tarball, bill of materials, third-party licences, checksums.
#
#   packaging/build.sh BINARY [FOLDER]        FOLDER: dist
#
# Needs cargo (for the list of what is linked), dpkg-deb, binutils, gzip. The output depends on the binary and the repository alone: times in
# it are SOURCE_DATE_EPOCH, or that of the last commit. `make package` builds the binary too. PENSTOCK_PACK=fast packs quickly and loosely.
set -euo pipefail
export LC_ALL=C.UTF-8

die() { printf 'packaging: %s\n' "$*" >&2; exit 1; }
say() { printf 'packaging: %s\n' "$*" >&2; }

[ $# -ge 1 ] || die "give the binary: packaging/build.sh BINARY [FOLDER]"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binary=$(realpath "$1")
out=$(realpath -m "${2:-$root/dist}")
[ -x "$binary" ] || die "$1 is not a program"
for tool in cargo dpkg-deb strip readelf gzip tar sha256sum python3; do
  command -v "$tool" >/dev/null || die "$tool is missing"
done

version=$("$binary" version | sed 's/^penstock //')
architecture=$(uname -m)
case $architecture in
x86_64) debian=amd64 ;;
aarch64) debian=arm64 ;;
*) die "packages for $architecture are not made" ;;
esac
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

# Levels of gzip for the tarball, and of the .deb.
pack=(9 -Zxz)
[ "${PENSTOCK_PACK:-}" = fast ] && pack=(1 -Zgzip -z1)

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$out"

# put MODE SOURCE PLACE: a file below the staged root.
put() { install -D -m "$1" "$2" "$stage/tree/$3"; }
# archive FOLDER NAME: NAME.tar.gz of FOLDER, the same bytes each time.
archive() {
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$1" -c "$2" | gzip "-${pack[0]}n" >"$out/$2.tar.gz"
}

# floor LIBRARY: newest version of the library's symbols that the binary asks for (2.34 of GLIBC_2.34).
floor() {
  readelf --version-info --wide "$stage/tree/usr/bin/penstock" | grep -o "$1_[0-9.]*" | sed "s/$1_//" | sort -Vu | tail -n 1
}

say "version $version for $architecture"
mkdir -p "$stage/tree/usr/bin"
strip --strip-debug -o "$stage/tree/usr/bin/penstock" "$binary"
chmod 755 "$stage/tree/usr/bin/penstock"
glibc=$(floor GLIBC)
gcc=$(floor GCC)
[ -n "$glibc" ] || die "$binary asks for no version of glibc: not a program that was linked for it"

put 644 "$root/packaging/systemd/penstock.service" usr/lib/systemd/system/penstock.service
put 640 "$root/packaging/penstock.toml" etc/penstock/penstock.toml
put 644 "$root/configs/penstock.toml" usr/share/doc/penstock/penstock.toml
put 644 "$root/configs/prices.toml" usr/share/doc/penstock/prices.toml
put 644 "$root/packaging/prometheus/alerts.yaml" usr/share/doc/penstock/alerts.yaml
put 644 "$root/configs/grafana/penstock.json" usr/share/doc/penstock/grafana.json
for example in "$root"/configs/examples/*.toml; do
  put 644 "$example" "usr/share/doc/penstock/examples/$(basename "$example")"
done
put 644 "$root/LICENSE" usr/share/doc/penstock/copyright
"$binary" completions bash | install -D -m 644 /dev/stdin "$stage/tree/usr/share/bash-completion/completions/penstock"
"$binary" completions zsh | install -D -m 644 /dev/stdin "$stage/tree/usr/share/zsh/vendor-completions/_penstock"
"$binary" completions fish | install -D -m 644 /dev/stdin "$stage/tree/usr/share/fish/vendor_completions.d/penstock.fish"
"$binary" man "$stage/tree/usr/share/man/man1" 2>/dev/null
gzip -9n "$stage"/tree/usr/share/man/man1/*.1
gzip -9nc "$root/CHANGELOG.md" | install -m 644 /dev/stdin "$stage/tree/usr/share/doc/penstock/changelog.gz"

say "bill of materials and licences"
python3 "$root/packaging/third_party.py" sbom >"$out/penstock-$version.cdx.json"
python3 "$root/packaging/third_party.py" licences >"$out/THIRD-PARTY.txt"
gzip -9nc "$out/THIRD-PARTY.txt" | install -m 644 /dev/stdin "$stage/tree/usr/share/doc/penstock/THIRD-PARTY.txt.gz"

# The tarball is the same tree below one folder, with the place of a unit that was installed by hand.
tarball=penstock-$version-$architecture-linux
mkdir -p "$stage/$tarball"
cp -a "$stage/tree/usr/bin" "$stage/tree/usr/share" "$stage/$tarball/"
mkdir -p "$stage/$tarball/lib/systemd/system"
sed 's#/usr/bin/#/usr/local/bin/#' "$root/packaging/systemd/penstock.service" >"$stage/$tarball/lib/systemd/system/penstock.service"
install -D -m 644 "$root/packaging/penstock.toml" "$stage/$tarball/etc/penstock/penstock.toml"
cp "$root/LICENSE" "$stage/$tarball/LICENSE"
cp "$out/THIRD-PARTY.txt" "$stage/$tarball/THIRD-PARTY.txt"
cat >"$stage/$tarball/README" <<README
penstock $version for $architecture Linux with glibc $glibc or newer.

    sudo cp -r bin share /usr/local/
    penstock serve

As a service: docs/guide/install.md of the repository.
README
say "tarball"
archive "$stage" "$tarball"

say ".deb"
mkdir -p "$stage/tree/DEBIAN"
install -m 755 "$root"/packaging/debian/{postinst,prerm,postrm} "$stage/tree/DEBIAN/"
echo /etc/penstock/penstock.toml >"$stage/tree/DEBIAN/conffiles"
# passwd: useradd; util-linux, which has runuser, is essential.
cat >"$stage/tree/DEBIAN/control" <<CONTROL
Package: penstock
Version: $version
Architecture: $debian
Maintainer: penstock <penstock@localhost>
Installed-Size: $(du -sk --apparent-size --exclude=DEBIAN "$stage/tree" | cut -f1)
Depends: libc6 (>= $glibc), libgcc-s1 (>= ${gcc:-3.0}), passwd
Recommends: ca-certificates
Section: net
Priority: optional
Description: AI gateway with its own inference engine
 One program that speaks the APIs of OpenAI, Anthropic, Gemini and Ollama, sends
 requests to providers or to workers that hold the prompt's cache, and runs their
 model itself. With keys, limits, budgets, plugins (WebAssembly too), a web console and
 metrics.
CONTROL
(cd "$stage/tree" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$stage/md5sums"
mv "$stage/md5sums" "$stage/tree/DEBIAN/md5sums"
find "$stage/tree" -depth -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group "${pack[@]:1}" --build "$stage/tree" "$out/penstock_${version}_$debian.deb" >/dev/null

(cd "$out" && sha256sum "penstock_${version}_$debian.deb" "$tarball.tar.gz" "penstock-$version.cdx.json" THIRD-PARTY.txt >SHA256SUMS)
say "glibc $glibc or newer is needed; $(basename "$out") has:"
(cd "$out" && ls -s --block-size=KiB $(cut -d' ' -f3 SHA256SUMS) SHA256SUMS) >&2
