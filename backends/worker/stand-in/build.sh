#!/bin/sh
# Builds the stand-in for NVIDIA's management library with the system's C++ compiler, once per content of the source.
#
#   build.sh FOLDER two|one|silent|old    two GPUs; one; one that tells nothing; one of a library that lacks functions
#
# Prints the path. The library lies alone in its folder, for LD_LIBRARY_PATH. Processes that build at once wait for each other.
set -eu
out=$1 what=$2
here=$(cd "$(dirname "$0")" && pwd)
hash=$(cat "$here"/* | cksum | tr ' ' -)
case $what in
two) flags=-DGPUS=2 ;;
one) flags=-DGPUS=1 ;;
silent) flags="-DGPUS=1 -DSILENT" ;;
old) flags="-DGPUS=1 -DOLD" ;;
*) echo "build.sh: no $what" >&2 && exit 2 ;;
esac
name=$out/$hash/$what/libnvidia-ml.so.1
mkdir -p "$(dirname "$name")"
exec 9>"$out/$hash/$what.lock"
flock 9
if [ ! -e "$name" ]; then
  c++ -std=c++17 -O1 -Wall -Wextra -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 $flags -x c++ "$here/libnvidia-ml.cc" -o "$name.new"
  mv "$name.new" "$name"
fi
echo "$name"
