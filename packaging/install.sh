#!/usr/bin/env bash
# Installs parkd from a wheel into an environment of its own, as a stranger would.
#
#   packaging/install.sh PREFIX WHEEL [EXTRA,...]
#
# EXTRA is what models run on: torch (if none is named), cuda (torch, and kernels for it), llama-cpp (GGUF files, without
# torch), or - for neither, beside a llama-server. PREFIX/bin/parkd is the command. PYTHON names the interpreter. TORCH_ARGS
# is handed to pip for torch alone, for example --index-url and the index of torch's CPU builds. CONSTRAINTS names a file of
# exact versions.
set -euo pipefail
prefix=$1 wheel=$2 extras=${3:-torch}
"${PYTHON:-python3}" -m venv "$prefix"
pip() { "$prefix/bin/python" -m pip --disable-pip-version-check install -q ${CONSTRAINTS:+-c "$CONSTRAINTS"} "$@"; }
# torch comes first and alone, so that nothing else decides which build of it is taken.
case ",$extras," in *,torch,* | *,cuda,* | *,demo,*) pip ${TORCH:-torch} ${TORCH_ARGS:-} ;; esac
if [ "$extras" = - ]; then pip "$wheel"; else pip "${wheel}[$extras]"; fi
"$prefix/bin/parkd" --version
