#!/usr/bin/env bash
# The TensorRT part of the GPU benchmark from beginning to end, after `pack86.sh`'s parts are unpacked into W:
#     tar xf small.tar.xz; cat tensorrt.tar.zst.* | LD_LIBRARY_PATH=zstd zstd/zstd -d --long=30 -c | tar x
# usage: run86.sh CHECKPOINT PROMPTS.json SCALES.safetensors   (W=/tmp/w; results, one JSON object a line: W/results.jsonl)
#
# Start it with setsid and look at W/log: it goes on while a machine is kept warm by other calls, and it measures what
# has been built when DEADLINE seconds (300) are over. Two layers of a 7B come first: they tell in a minute which form
# of the graph is fast, and warm the timing caches that the whole model is built with.
set -uo pipefail
W=${W:-/tmp/w}; export W
checkpoint=$1 prompts=$2 scales=$3
here=$(cd "$(dirname "$0")" && pwd)/tensorrt86.sh
log=$W/log; mkdir -p "$log" "$W/g" "$W/e"
export HF_HUB_OFFLINE=1
left() { echo $((${DEADLINE:-300} - SECONDS)); }
step() { # NAME COMMAND WORDS...: with a log and, at its end, the exit code and the seconds since the start
  local name=$1; shift
  timeout "${LIMIT:-$(($(left) > 5 ? $(left) : 5))}" bash "$here" "$@" >"$log/$name" 2>&1
  echo "exit code $? at $SECONDS s" >>"$log/$name"
}
made() { # ENGINE GRAPH "BUILD WORDS" "GRAPH WORDS": a graph, once, and an engine of it
  [ -f "$W/g/$2/model.onnx" ] || step "graph-$2" graph "$W/g/$2" $4
  step "build-$1" build "$W/g/$2" "$W/e/$1" --cache "$W/e/$1.timing" $3
}
measured() { # ENGINE WORDS...
  local name=$1; shift
  [ -f "$W/e/$name/manifest.json" ] || return 0
  LIMIT=90 step "decode-$name" decode "$W/e/$name" "$@"
  grep '^{' "$log/decode-$name" | tail -1 >>"$W/results.jsonl"
}
smol="--model $checkpoint --capacity 256"
step reference reference "$checkpoint" "$prompts" "$W/tokens.json" --count 48 &
made i2 i2 "--batches 1" "--precision int8 --layers 2" &
made i2-join i2-join "--batches 1" "--precision int8 --layers 2 --join" &
made i2-cut i2-cut "--batches 1" "--precision int8 --layers 2 --join --cut 4" &
made f2-join f2-join "--batches 1" "--precision fp16 --layers 2 --join" &
made s16 s16 "--batches 1 8 32" "--precision fp16 --join $smol" &
made s8 s8 "--batches 1 8 32" "--precision int8 --join --scales $scales $smol" &
wait
for name in i2 i2-join i2-cut f2-join; do measured $name --batches 1 --answer 64 --profile 1; done
made i7 i7 "--batches 1 8 32" "--precision int8 --layers 32 ${I7:---join}" &
made f7 f7 "--batches 1 8 32" "--precision fp16 --layers 32 ${F7:---join}" &
wait
for name in s16 s8; do measured $name --batches 1 8 32 --tokens "$W/tokens.json"; done
for name in i7 f7; do measured $name --batches 1 8 32; done
touch "$log/done"
