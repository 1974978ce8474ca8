#!/bin/sh
# Builds a test program or library of this folder with the system's C++ compiler, once per content of the sources.
#
#   build.sh FOLDER check [-DPLANT_…]     the checks of the kernels, or those of kernels with a planted bug
#   build.sh FOLDER driver                the stand-in for the driver's library, libcuda.so and libcuda.so.1
#
# Prints the path. The library lies alone in its folder, for LD_LIBRARY_PATH. Processes that build at once wait for each other.
set -eu
out=$1 what=$2 flags=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
hash=$(cat "$here"/../*.cu "$here"/../*.cuh "$here"/* | cksum | tr ' ' -)
case $what in
check) name=$out/$hash/check$flags options= source=check.cc ;;
driver) name=$out/$hash/driver/libcuda.so options="-shared -fPIC -Wl,-soname,libcuda.so" source=libcuda.cc ;;
*) echo "build.sh: no $what" >&2 && exit 2 ;;
esac
mkdir -p "$(dirname "$name")"
exec 9>"$name.lock"
flock 9
if [ ! -e "$name" ]; then
  # Programs with a planted bug are built without optimization: they end at the first check that fails, so optimizing would take longer
  # than it saves.
  level=-O2
  if [ -n "$flags" ]; then level=-O0; fi
  # Without contraction of products and sums, so that every machine computes the same bits. A fortified longjmp, which some toolchains
  # have by default, ends a program that jumps between stacks, as the model of the GPU does.
  c++ -std=c++17 $level -ffp-contract=off -U_FORTIFY_SOURCE -Wall -Wextra -Wno-unknown-pragmas $options $flags -I"$here/.." -x c++ "$here/$source" -o "$name.new"
  # A program may look for either name first; a real driver on the machine has both.
  if [ "$what" = driver ]; then ln -sf libcuda.so "$name.1"; fi
  mv "$name.new" "$name"
fi
echo "$name"
