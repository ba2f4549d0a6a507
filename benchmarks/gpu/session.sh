#!/usr/bin/env bash
# Proves and measures the GPU path on one GPU, in three parts of less than ten minutes each (README.md beside this file).
#
#   benchmarks/gpu/session.sh PART [OUTPUT_FOLDER] [--from SESSION_JSON] [--seconds N]
#
# PART is 1, 2 or 3. The folder, build/gpu if none is named, gets session.json and PART.log, and nothing else.
# It needs no network and installs nothing. What a part has measured is not measured again.
#   PYTHON            the interpreter that has torch, transformers and triton (default: python3)
#   DYNATREE_WHEELS   a folder of wheels that it lacks: they go into a folder that is removed in the end
#   DYNATREE_MODELS   where the grown models are kept (default: a folder of the system's temporary one)
#   DYNATREE_COMMIT   the commit, where the checkout is no git repository
#   DYNATREE_TINY     1: tiny shapes, which run on a CPU as well
set -euo pipefail

usage="usage: benchmarks/gpu/session.sh PART [OUTPUT_FOLDER] [--from SESSION_JSON]; PART is 1, 2 or 3"
part=${1:?$usage}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
output=${2:-$root/build/gpu}
more=("${@:3}")
python=${PYTHON:-python3}

path=$root/protos:$root/common:$root/draft_service:$root/verify_service:$root/client:$root/benchmarks
if [[ -n ${DYNATREE_WHEELS:-} ]]; then
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$DYNATREE_WHEELS"/*.whl
  path=$path:$packages
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

mkdir -p "$output"
"$python" "$root/benchmarks/gpu/session.py" "$part" "$output" ${more[@]+"${more[@]}"} 2>&1 | tee -a "$output/$part.log"
