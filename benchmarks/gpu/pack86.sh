#!/usr/bin/env bash
# Packs TensorRT 8.6.0 and a Python 3.10 for a GPU machine that has no registry, in parts of PART bytes.
# usage: pack86.sh OUT   (takes pip, python3.10, gcc, nm, zstd, xz; 468 MB in 8 parts and 18 MB beside them were seen)
#
# The library goes as it is: TensorRT checks its kernels' digest when a builder is made, so a copy with the kernels of
# other GPUs left out is refused ("validateCaskKLibDigest", seen). zstd's long window finds what the wheel's own
# compression does not: 468 MB instead of 819.
set -euo pipefail
out=$1 part=${PART:-58600000}
python=${PYTHON310:-python3.10}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/site" "$work/py/bin" "$work/stubs"
wheel() { # NAME==VERSION PLATFORMS...
  local name=$1 platforms=()
  shift
  for one in "$@"; do platforms+=(--platform "$one"); done
  python3 -m pip download --quiet --no-deps --python-version 3.10 --implementation cp "${platforms[@]}" \
    --only-binary=:all: --dest "$work/wheels" "$name"
}
wheel tensorrt==8.6.0 manylinux_2_17_x86_64
wheel cuda-bindings==13.4.4 manylinux_2_24_x86_64 manylinux_2_28_x86_64
wheel cuda-pathfinder manylinux_2_28_x86_64
wheel numpy==2.2.6 manylinux_2_17_x86_64
python3 -m zipfile -e "$work"/wheels/tensorrt-*.whl "$work/trt"
for one in "$work"/wheels/{cuda,numpy}*.whl; do python3 -m zipfile -e "$one" "$work/site"; done
find "$work/site" -depth \( -name tests -o -name __pycache__ -o -name '*.pyi' \) -exec rm -rf {} +

# TensorRT's plugin library asks for cuBLAS 12 and cuDNN 8, which engines from ONNX do not use: stand-ins let it load.
nm -D --undefined-only "$work/trt/tensorrt/libnvinfer_plugin.so.8" | awk '{print $2}' | sed 's/@.*//' | sort -u >"$work/symbols"
stand_in() { # LIBRARY VERSION PATTERN
  { grep -E "$3" "$work/symbols" || true; } | awk '{print "int " $1 "(void) { return 1; }"}' >"$work/one.c"
  echo "lib$1.so.$2 { global: *; };" >"$work/one.map"
  gcc -w -shared -fPIC -Wl,-soname,"lib$1.so.$2" -Wl,--version-script="$work/one.map" -o "$work/stubs/lib$1.so.$2" "$work/one.c"
}
stand_in cublas 12 '^cublas[^L]'
stand_in cublasLt 12 '^cublasLt'
stand_in cudnn 8 '^cudnn'

home=$("$python" -c 'import sys; print(sys.base_prefix)')
cp -a "$home/bin/python3.10" "$work/py/bin/"
mkdir -p "$work/py/lib"
cp -a "$home"/lib/libpython3.10.so* "$home/lib/python3.10" "$work/py/lib/"
(cd "$work/py/lib/python3.10" && rm -rf test site-packages config-* idlelib ensurepip lib2to3 tkinter turtledemo && mkdir site-packages)
find "$work/py" -depth \( -name tests -o -name __pycache__ \) -exec rm -rf {} +
find "$work/py" -name '*.so*' -type f -exec strip {} +

mkdir "$work/zstd" # for a machine that has none, with the one library that it may lack
cp "$(command -v zstd)" $(ldd "$(command -v zstd)" | grep -o '/[^ ]*liblz4[^ ]*') "$work/zstd/"
tar -C "$work" -cJf "$out/small.tar.xz" py site stubs zstd
tar -C "$work/trt" -cf - tensorrt | zstd -8 --long=30 -T0 -q | split -b "$part" -d -a 2 - "$out/tensorrt.tar.zst."
ls -l "$out"
