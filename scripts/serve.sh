#!/usr/bin/env bash
# Start `vllm serve` with kvcompile, from settings in the environment.
#
#   MODEL=/models/llama scripts/serve.sh [--dry-run] [arguments of vllm serve]
#
#   --dry-run    print the command instead of running it
#
#   MODEL                      folder of a Hugging Face checkpoint, or a hub name; the only one that has to be set
#   MAX_MODEL_LEN              --max-model-len, tokens of a prompt and its answer
#   MAX_NUM_BATCHED_TOKENS     --max-num-batched-tokens, tokens of a step
#   MAX_NUM_SEQS               --max-num-seqs, requests of a step
#   GPU_MEMORY_UTILIZATION     --gpu-memory-utilization, above 0, at most 1
#   SERVER_HOST, PORT          --host, --port
#   VLLM_ANDPRO_BUDGET_TOKENS  tokens that a prompt keeps; default: half, at least 544. Where pruning is switched off
#                              (KVCOMPILE_PRUNE_ENABLED=0) it does nothing, and kvcompile's line in the server's log
#                              says so. KVCOMPILE_PRUNE_BUDGET_TOKENS is another name of it
#   OFFLOAD                    1: offload to the host as OFFLOAD_CONFIG says; 0: not
#   OFFLOAD_CONFIG             the file for --kv-transfer-config; default config/offload.json beside this folder
#   VLLM                       the vllm command; default vllm, as found on PATH
#
# What is unset or empty is left to vLLM. kvcompile reads its own KVCOMPILE_* by itself; config/optimized.env lists all.
# Arguments given here come last, so that they win. The server takes this script's place and gets its signals.
set -euo pipefail

fail() {
    printf 'serve.sh: error: %s\n' "$1" >&2
    exit 2
}

# whole NAME HIGHEST: the variable is unset, empty, or a whole number from 1.
whole() {
    local value=${!1-}
    if [[ -n $value ]] && ! { [[ $value =~ ^[1-9][0-9]{0,9}$ ]] && ((value <= $2)); }; then
        fail "$1 is ${value@Q}; allowed is a whole number from 1 to $2; correct it, or unset it for the default"
    fi
}

if [[ ${1-} == --help || ${1-} == -h ]]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi

dry_run=0
further=()
for argument in "$@"; do
    if [[ $argument == --dry-run ]]; then dry_run=1; else further+=("$argument"); fi
done

[[ -n ${MODEL-} ]] || fail "MODEL is not set; set it to the folder of a Hugging Face checkpoint, or to a hub name"
[[ $MODEL != -* ]] || fail "MODEL is ${MODEL@Q}, which would be taken for an option; write ./ before a folder's name"
most=2147483647
whole MAX_MODEL_LEN $most
whole MAX_NUM_BATCHED_TOKENS $most
whole MAX_NUM_SEQS $most
whole PORT 65535
for name in VLLM_ANDPRO_BUDGET_TOKENS KVCOMPILE_PRUNE_BUDGET_TOKENS; do
    [[ ${!name-} == none ]] || whole "$name" $most
    [[ -n ${!name-} ]] || unset "$name" # kvcompile would take an empty one for a mistake
done
share=${GPU_MEMORY_UTILIZATION-}
[[ -z $share || $share =~ ^(0?\.[0-9]*[1-9][0-9]*|1(\.0*)?)$ ]] ||
    fail "GPU_MEMORY_UTILIZATION is ${share@Q}; allowed is a number above 0, at most 1; correct it, or unset it"
[[ ${OFFLOAD-} =~ ^[01]?$ ]] || fail "OFFLOAD is ${OFFLOAD@Q}; allowed are 1 and 0"

vllm=${VLLM-vllm}
[[ -n $vllm ]] || fail "VLLM is empty; set it to the path of the vllm command, or unset it for the one on PATH"
found=$(type -P -- "$vllm" || true)
[[ -f $found && -x $found ]] ||
    fail "the command ${vllm@Q} is not there or cannot be run; activate vLLM's environment, or set VLLM to its path"

command=("$vllm" serve "$MODEL" --compilation-config kvcompile)
option() { [[ -z $2 ]] || command+=("$1" "$2"); }
option --max-model-len "${MAX_MODEL_LEN-}"
option --max-num-batched-tokens "${MAX_NUM_BATCHED_TOKENS-}"
option --max-num-seqs "${MAX_NUM_SEQS-}"
option --gpu-memory-utilization "$share"
option --host "${SERVER_HOST-}"
option --port "${PORT-}"

if [[ ${OFFLOAD-} == 1 ]]; then
    file=${OFFLOAD_CONFIG:-$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)/config/offload.json}
    [[ -f $file && -r $file ]] ||
        fail "OFFLOAD_CONFIG ${file@Q} is no file that can be read; name one, or set OFFLOAD=0"
    command+=(--kv-transfer-config "$(tr -d '\r\n' <"$file")") # which mean nothing in JSON, and a dry run is one line
fi

command+=(${further[@]+"${further[@]}"})
if ((dry_run)); then
    printf -v line '%q ' "${command[@]}"
    printf '%s\n' "${line% }"
    exit 0
fi
exec -- "${command[@]}"
