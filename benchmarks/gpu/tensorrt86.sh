#!/usr/bin/env bash
# The TensorRT part of the GPU benchmark on a machine with full TensorRT 8.6.0 (the last with a real wheel on PyPI).
# usage: tensorrt86.sh graph|build|decode|serve|reference WORDS...   each runs one of the scripts beside this one
#
# W (default /tmp/w) holds: tensorrt/ (the wheel, unzipped), stubs/ (cuBLAS and cuDNN stand-ins: TensorRT's own kernels
# need neither), py/ (a Python 3.10) and site/ (NumPy and cuda-bindings for it). `python3` is one with torch,
# transformers and onnx. NVRTC names the folder of libnvrtc. Where W has cublas/lib, `build --cublas` can use it; `serve`
# needs the server's packages in site/ too. TOKENIZER: a checkpoint whose tokenizer `build` adds. UNDER: a profiler and
# its words, which then starts the program.
set -euo pipefail
W=${W:-/tmp/w}
here=$(cd "$(dirname "$0")/../.." && pwd)
nvrtc=${NVRTC:-/usr/local/cuda/lib64} # the folder of libnvrtc
tensorrt() {
  env LD_LIBRARY_PATH="$W/cublas/lib:$W/stubs:$W/tensorrt:$W/py/lib:$nvrtc:${LD_LIBRARY_PATH:-}" PYTHONPATH="$here:$W/site:$W" \
    CUDA_MODULE_LOADING=LAZY PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 ${UNDER:-} "$W/py/bin/python3.10" -m "$@"
}
what=$1
shift
case $what in
  graph) PYTHONPATH=$here python3 -m benchmarks.gpu.graphs "$@" ;;
  reference) PYTHONPATH=$here python3 -m benchmarks.gpu.greedy "$@" ;;
  build)
    tensorrt benchmarks.gpu.engines build "$@"
    PYTHONPATH=$here python3 -m benchmarks.gpu.engines seal "$2" ${TOKENIZER:+--tokenizer "$TOKENIZER"}
    ;;
  decode) tensorrt benchmarks.gpu.decode "$@" ;;
  serve) tensorrt pipeline.cli serve "$@" ;;
  *) sed -n '2,4p' "$0"; exit 64 ;;
esac
