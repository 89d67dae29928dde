# Settings of this folder's recipes, which source it: environment variables, else those of the demo model or the paper.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
name=$(basename "$0" .sh)
if [ -n "${PAPER:-}" ]; then
    MODEL=${1:-${MODEL:-allenai/OLMoE-1B-7B-0924}}
    TEXT=${TEXT:-allenai/c4}
    LENGTH=${LENGTH:-512}
fi
MODEL=${1:-${MODEL:-$root/compressor/demo/checkpoint}} # a folder or an id of the Hub
TEXT=${TEXT:-demo}                                     # calibration text
SAMPLES=${SAMPLES:-32}                                 # sequences of it
LENGTH=${LENGTH:-128}                                  # tokens in each
OUT=${OUT:-$name}                                      # a new folder

# attribute FOLDER [OPTION ...]
attribute() {
    local folder=$1
    mkdir -p "$(dirname "$folder")"
    shift
    moe-compress attribute "$MODEL" --calibration "$TEXT" --samples "$SAMPLES" --sequence-length "$LENGTH" -o "$folder" "$@"
}
