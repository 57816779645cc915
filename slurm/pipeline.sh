#!/usr/bin/env bash
# Submit the whole pipeline: record, slices (an array), calibrate, replay. Each starts when the one before has succeeded,
# and is cancelled when it has not. Prints the jobs' ids. The site's options go into SBATCH_* variables. PRISM_NODES: nodes of
# each job (default: pairs for slices and replay, an assistant's node and the ranks'; 1 for the others).
set -euo pipefail

if (($# < 6)) || [[ $5 != -- ]]; then
  echo "usage: pipeline.sh FOLDER W S RANKS -- [-m] program [argument ...]" >&2
  echo "W ranks, measured S at a time, RANKS (such as 0-3,8) replayed; graphs and logs go to FOLDER" >&2
  exit 2
fi
folder=$1 world=$2 size=$3 ranks=$4
shift 5
for number in "$world" "$size"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "pipeline.sh: '$number' is no whole number >= 1" >&2; exit 2; }
done
# What the last job would find out after all others have run.
[[ $ranks =~ ^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$ ]] || { echo "pipeline.sh: '$ranks' is no list of ranks such as 0-3,8" >&2; exit 2; }
for rank in ${ranks//[,-]/ }; do
  ((10#$rank < world)) || { echo "pipeline.sh: no rank $rank (there are 0-$((world - 1)))" >&2; exit 2; }
done
[[ $1 = -m || -e $1 ]] || { echo "pipeline.sh: $1: no such program; give a Python script, or -m module" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$folder"
mkdir "$folder/slices" 2>/dev/null || { # slices of another recording must not be merged with these
  echo "pipeline.sh: $folder: holds slices already; name another folder" >&2
  exit 1
}

jobs=()
undo() { # what could not be submitted would be missed
  ((BASH_SUBSHELL == 0)) || return 0 # an error within $(...) is one of the script's too
  [[ ${#jobs[@]} = 0 ]] || scancel "${jobs[@]}"
  rmdir "$folder/slices"
}
trap undo ERR
trap 'undo; exit 130' INT
trap 'undo; exit 143' TERM
submit() { # NAME SBATCH-ARGUMENT...
  local name=$1 id after=()
  shift
  [[ ${#jobs[@]} = 0 ]] || after=("--dependency=afterok:${jobs[-1]}" --kill-on-invalid-dep=yes)
  id=$(sbatch --parsable --output="${folder//%/%%}/%x-%j.out" "${after[@]}" "$@")
  jobs+=("${id%%;*}") # "ID;CLUSTER" on some sites
  echo "$name ${jobs[-1]}"
}
set -E # the trap holds in functions too
submit record --nodes="${PRISM_NODES:-1}" "$here/record.sbatch" -n "$world" -o "$folder/bare.h5" -- "$@"
tasks=$(((world - 1) / size + 1)) # the plan, which has more slices where these keep nodes and groups together, needs the recording
submit slices --nodes="${PRISM_NODES:-2}" --array="0-$((tasks - 1))" "$here/slice.sbatch" --every "$tasks" "$folder/slices" "$folder/bare.h5" -s "$size"
submit calibrate --nodes="${PRISM_NODES:-1}" "$here/calibrate.sbatch" "$folder/slices" "$size" "$folder/calibrated.h5"
submit replay --nodes="${PRISM_NODES:-2}" "$here/replay.sbatch" -r "$ranks" "$folder/calibrated.h5" -o "$folder/replayed.h5"
