#!/usr/bin/env bash
# Runs a part of the kit, without a network: bash gpu-kit/run.sh PART [--cpu]
#
# PART   correctness, speed, whole_run, comparison; all-1 is the first two, all-2 the others, each at most ten minutes
# --cpu  everything at the smallest sizes, without a GPU
#
# Results, one JSON and one log for each part, go to $OUT (gpu-kit/results). $PYTHON (python3) is a Python with torch. Exit
# status: 0 all checks passed, 1 one failed, 2 the kit cannot be installed, 3 none failed and one did not run.
set -uo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
out=${OUT:-$kit/results}
venv=${GPU_KIT_VENV:-${TMPDIR:-/tmp}/verbatim-gpu-kit-$(id -u)}

case ${1:-} in
  all-1) parts="correctness speed" ;;
  all-2) parts="whole_run comparison" ;;
  correctness | speed | whole_run | comparison) parts=$1 ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
shift
mkdir -p "$out"

# An environment of its own, which sees the packages of the Python that made it: also where that is an environment itself,
# whose packages are not those of the system.
install() {
  rm -rf "$venv"
  "$python" -m venv --without-pip --system-site-packages "$venv" &&
    "$python" - "$venv" <<'PTH' &&
import pathlib, sys, sysconfig
if sys.prefix != sys.base_prefix:
    inside = {"base": sys.argv[1], "platbase": sys.argv[1]}
    seen = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    text = f"import site; list(map(site.addsitedir, {list(seen)!r}))\n"  # Python 3.11 sees no `site` in a comprehension
    pathlib.Path(sysconfig.get_path("purelib", vars=inside), "zz_seen.pth").write_text(text)
PTH
    add -r "$kit/install.txt" || return 1
  if [ -s "$kit/install-too.txt" ]; then
    add -r "$kit/install-too.txt" || echo "run.sh: not installed: $(tr '\n' ' ' <"$kit/install-too.txt")" >&2
  fi
  echo "$state" >"$venv/installed"
}

add() {
  "$python" -m pip --python "$venv/bin/python" --disable-pip-version-check install --quiet --no-index \
    --find-links "$kit/wheels" "$@"
}

state=$("$python" -c 'import sys; print(sys.executable, sys.version)' && cd "$kit/wheels" && cksum -- *.whl) || exit 2
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$state" ]; then
  install || { echo "run.sh: the kit cannot be installed" >&2; exit 2; }
fi

export PYTHONPATH=$kit/benchmarks PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
worst=0
for part in $parts; do
  "$venv/bin/python" -m gpu_kit "$part" --out "$out" "$@" 2>&1 | tee "$out/$part.log"
  status=${PIPESTATUS[0]}
  case $status in
    0) ;;
    3) [ "$worst" -ne 0 ] || worst=3 ;;
    *) worst=1 ;;
  esac
done
exit "$worst"
