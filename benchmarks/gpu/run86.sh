#!/usr/bin/env bash
# The TensorRT part of the GPU benchmark, after `pack86.sh`'s parts are unpacked into W (default /tmp/w):
#     tar xf small.tar.xz; cat tensorrt.tar.zst.* | LD_LIBRARY_PATH=zstd zstd/zstd -d --long=30 -c | tar x
# usage: run86.sh forms                                    two layers of a 7B in several forms, to see which is fast
#        run86.sh whole                                    the 7B shape in the forms that I7 and F7 name (graph words),
#                                                          with the timing caches of the forms I7_FROM and F7_FROM
#        run86.sh small CHECKPOINT PROMPTS.json SCALES.safetensors    a checkpoint in float16 and INT8, against torch
#
# Start each with setsid and look at W/log: it goes on while a machine is kept warm by other calls. Results, one JSON
# object a line: W/results.jsonl. Builds share the GPU (W/gpu is their lock), a measurement has it alone.
set -uo pipefail
W=${W:-/tmp/w}; export W
here=$(cd "$(dirname "$0")" && pwd)/tensorrt86.sh
log=$W/log; mkdir -p "$log" "$W/g" "$W/e"
export HF_HUB_OFFLINE=1
step() { # NAME LOCK COMMAND WORDS...: with a log and, at its end, the exit code and the seconds since the start
  local name=$1 lock=$2; shift 2
  flock $lock "$W/gpu" timeout "${LIMIT:-420}" bash "$here" "$@" >"$log/$name" 2>&1
  echo "exit code $? at $SECONDS s" >>"$log/$name"
}
made() { # ENGINE GRAPH "GRAPH WORDS" "BUILD WORDS": a graph, once, and an engine of it
  [ -f "$W/g/$2/model.onnx" ] || step "graph-$2" -s graph "$W/g/$2" $3
  step "build-$1" -s build "$W/g/$2" "$W/e/$1" --cache "$W/e/$1.timing" $4
}
measured() { # ENGINE WORDS...
  local name=$1; shift
  [ -f "$W/e/$name/manifest.json" ] || return 0
  LIMIT=90 step "decode-$name" -x decode "$W/e/$name" "$@"
  grep '^{' "$log/decode-$name" | tail -1 >>"$W/results.jsonl"
}
forms() {
  local two="--layers 2" steps="--batches 1 8 --steps-only" cut="--cut o_proj:4 down_proj:4"
  made i2-join i2-join "--precision int8 $two --join" "$steps" # the first one writes the random numbers
  made f2-join f2-join "--precision fp16 $two --join" "$steps" &
  made i2-conv i2-conv "--precision int8 $two --join --convolve" "$steps" &
  made i2-cut i2-cut "--precision int8 $two --join $cut" "$steps" &
  wait
  made i2 i2 "--precision int8 $two" "$steps" &
  made i2-join-l4 i2-join "" "$steps --level 4" &
  made f2-conv f2-conv "--precision fp16 $two --join --convolve" "$steps" &
  wait
  if [ -d "$W/cublas/lib" ]; then
    made i2-join-cublas i2-join "" "$steps --cublas" &
    made f2-join-cublas f2-join "" "$steps --cublas" &
    wait
  fi
  for name in i2-join f2-join i2-conv i2-cut i2 i2-join-l4 f2-conv i2-join-cublas f2-join-cublas; do
    measured $name --batches 1 8 --profile 1
  done
}
whole() {
  local all="--batches 1 8 32"
  cp "$W/e/${I7_FROM:-i2-join}.timing" "$W/e/i7.timing"
  cp "$W/e/${F7_FROM:-f2-join}.timing" "$W/e/f7.timing"
  made i7 i7 "--precision int8 --layers 32 ${I7:---join}" "$all ${I7_BUILD:-}" &
  made f7 f7 "--precision fp16 --layers 32 ${F7:---join}" "$all ${F7_BUILD:-}" &
  wait
  for name in i7 f7; do measured $name --batches 1 8 32 --profile 1; done
}
small() {
  local checkpoint=$1 prompts=$2 scales=$3
  local model="--model $checkpoint --capacity 256 --join" all="--batches 1 8 32"
  step reference -s reference "$checkpoint" "$prompts" "$W/tokens.json" --count 48 &
  made s16 s16 "--precision fp16 $model" "$all" &
  made s8 s8 "--precision int8 --scales $scales $model" "$all" &
  wait
  for name in s16 s8; do measured $name --batches 1 8 32 --tokens "$W/tokens.json"; done
}
what=$1; shift
case $what in
  forms | whole | small) "$what" "$@" ;;
  *) sed -n '2,12p' "$0"; exit 64 ;;
esac
touch "$log/done-$what"
