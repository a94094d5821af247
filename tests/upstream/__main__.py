"""Run vLLM's own tests against method ssd: ``python -m tests.upstream``."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from .fetch import fetch_tests
from .inject import METHOD, SEEN
from .listed import FILES, MODELS
from .models import ensure_models, name_models, save_image
from .plugin import RESULTS, SHORT
from .table import RESULTS as RESULTS_FILE

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_FOLDER = _ROOT / ".upstream"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("--short", action="store_true", help="only the most telling tests")
    parser.add_argument("--method", default="ssd", choices=("ssd", "ngram", "none"))
    parser.add_argument("files", nargs="*", help="of the list; all by default")
    arguments, for_pytest = parser.parse_known_args()
    source = fetch_tests(_FOLDER)
    pairs = ensure_models(_ROOT / ".models")
    hub = _FOLDER / "hub"
    name_models(hub, {name: pairs[model] for name, model in MODELS.items()})
    save_image(_FOLDER / "assets")
    chosen = [
        f"tests/{file.path}"
        for file in FILES.values()
        if (file.path in arguments.files or not arguments.files)
        and (file.short or not arguments.short)
    ]
    paths = [_HERE / "entry", _HERE.parent, _ROOT, os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))),
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ASSETS_CACHE": str(_FOLDER / "assets"),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        METHOD: arguments.method,
        SEEN: str(_FOLDER / "seen"),
        RESULTS: str(RESULTS_FILE),
        SHORT: "1" if arguments.short else "",
    }
    pytest = [sys.executable, "-m", "pytest", "-p", "upstream.plugin", "--disable-warnings"]
    command = [*pytest, "--durations=0", "--durations-min=1", *for_pytest, *chosen]
    return subprocess.run(command, cwd=source, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
