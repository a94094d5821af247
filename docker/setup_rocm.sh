#!/usr/bin/env bash
# Adds vllm-ssd, with its tests and benchmarks, to a Python that has vLLM for ROCm.
# docker/Dockerfile.rocm runs it; on a machine without containers call it from any folder:
#
#   docker/setup_rocm.sh
#
# PYTHON: that Python, python3 by default. AMD_FLASHINFER: the FlashInfer of the draft's attention,
# as pip names it; auto, the default, is the release for the ROCm that is there, "" is none.
# AMD_INDEX: the package index that has it. docs/rocm.md says which variables to set before.
#
# Not run by its author on an AMD GPU: none was at hand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
flashinfer="${AMD_FLASHINFER-auto}"
index="${AMD_INDEX:-https://pypi.amd.com/simple/}"

# Before pip changes anything. What vLLM prints comes before the version of ROCm.
hip="$(
    "$python" - <<'END'
import sys

try:
    import torch
    import vllm
except ImportError as error:
    sys.exit(f"setup_rocm.sh: no vLLM here ({error}): install vLLM for ROCm, or name its Python in PYTHON")
if torch.version.hip is None:
    sys.exit("setup_rocm.sh: this torch is not for ROCm: install vLLM for ROCm, or name its Python in PYTHON")
from vllm_ssd.config.versions import version_mismatch

print(torch.version.hip)
sys.exit(version_mismatch(on_gpus=True))
END
)"
hip="${hip##*$'\n'}"

# Each release of AMD's FlashInfer is for some versions of ROCm.
if [ "$flashinfer" = auto ]; then
    case "$hip" in
    10.*) flashinfer=amd-flashinfer==0.6.18+amd.2 ;;
    *) flashinfer=amd-flashinfer==0.5.3+amd.2 ;; # up to ROCm 7.3
    esac
fi

# What is there stays as it is: torch, Triton and vLLM are builds for ROCm, and a newer version of
# what they need would be one they were not built with. Where that cannot be, pip says so and stops.
constraints="$(mktemp)"
trap 'rm -f "$constraints"' EXIT
"$python" -m pip list --format=freeze --exclude vllm-ssd --exclude ray >"$constraints"
"$python" -m pip install -c "$constraints" -e ".[rocm,dev]"

# --no-deps: FlashInfer names older versions of torch, and pip would replace the one that is there.
# Its kernels are compiled against that one, when they are first used.
install_flashinfer() {
    "$python" -m pip install --no-deps --index-url "$index" "$flashinfer" && return
    local version="${flashinfer##*==}" owner=AMD-Ecosystem
    [[ "$version" = 0.5.* ]] && owner=ROCm
    "$python" -m pip install -c "$constraints" cmake ninja scikit-build-core setuptools-scm &&
        "$python" -m pip install --no-deps --no-build-isolation \
            "git+https://github.com/$owner/flashinfer@v$version"
}
missing=
if [ -n "$flashinfer" ] && ! install_flashinfer; then
    missing="setup_rocm.sh: $flashinfer can be neither downloaded nor built: the draft's attention will be Triton's"
    flashinfer=
fi

# FlashInfer itself is only looked for: to import it takes a GPU, which no image build has.
"$python" - "$flashinfer" <<'END'
import importlib
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

for name in (
    "ray",
    "vllm",
    "vllm_ssd.service.keeper",
    "vllm_ssd.draft.attention.triton",
    "vllm_ssd.worker.device_client",
    "benchmarks.serving.__main__",
    "pytest",
):
    importlib.import_module(name)
if not entry_points(group="vllm.general_plugins", name="ssd"):
    sys.exit("setup_rocm.sh: vLLM would not find the plugin: its entry point is not installed")
if sys.argv[1] and find_spec("flashinfer") is None:
    sys.exit(f"setup_rocm.sh: {sys.argv[1]} did not bring a package flashinfer")
print("setup_rocm.sh: everything can be imported")
END
[ -z "$missing" ] || echo "$missing"

if "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    "$python" -m pytest -q -s tests/gpu/test_kernels.py tests/gpu/test_attention.py
    # Last, as its exit status is the script's: whether ssd can start here, and what to do if not.
    "$python" -m vllm_ssd.cli check
else
    echo "setup_rocm.sh: no GPU is visible here: try the kernels later, see docs/rocm.md, and run vllm-ssd check"
fi
