"""vLLM's own tests, as they are in the source distribution of the installed version."""

import hashlib
import io
import re
import subprocess
import sys
import tarfile
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

from benchmarks.standin.folders import say


def fetch_tests(folder: Path) -> Path:
    """Return `folder`/vllm-VERSION, which has vLLM's `tests` in it; fetched if it is not there.

    Raises RuntimeError if no index that pip knows has them.
    """
    name = f"vllm-{version('vllm').partition('+')[0]}"
    source = folder / name
    if not source.exists():
        content = _download(f"{name}.tar.gz")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            members = [m for m in archive.getmembers() if m.name.startswith(f"{name}/tests/")]
            archive.extractall(folder / "unpacked", members, filter="data")
        # Settings of its own: pytest would look for some in the folders above.
        settings = "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
        (folder / "unpacked" / name / "pytest.ini").write_text(settings)
        (folder / "unpacked" / name).rename(source)
    return source


def _download(file: str) -> bytes:
    """Directly: pip would build a source distribution before it gives it to anybody."""
    for index in _indexes():
        page = f"{index.rstrip('/')}/vllm/"
        try:
            listed = urlopen(page, timeout=60).read().decode()
            link = re.search(rf'href="([^"#]*{re.escape(file)})(?:#sha256=(\w+))?"', listed)
            if link:
                say(f"downloading {file}")
                content: bytes = urlopen(urljoin(page, link[1]), timeout=60).read()
                if link[2] not in (None, hashlib.sha256(content).hexdigest()):
                    raise RuntimeError(f"{file} is not the file that the index names")
                return content
        except (OSError, HTTPException) as error:
            say(f"no answer for {file}: {error}")
    raise RuntimeError(f"no index that pip knows has {file}")


def _indexes() -> list[str]:
    """Those that pip is configured with, the default one if it has no other."""
    from pip._internal.models.index import PyPI

    listed = [sys.executable, "-m", "pip", "config", "list"]
    output = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    options = dict(re.findall(r"^[^.\n]*\.([\w-]+)='(.*)'$", output, re.M))
    return [options.get("index-url", PyPI.simple_url), *options.get("extra-index-url", "").split()]
