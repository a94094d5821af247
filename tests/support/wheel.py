"""The package as users install it: built from its sources, into an environment of its own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def unpack_sources(folder: Path) -> Path:
    """What an sdist unpacks to, made from a copy, since building leaves files behind."""
    folder.mkdir(exist_ok=True)
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    pycache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vllm_ssd", folder / "vllm_ssd", ignore=pycache)
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist"], cwd=folder, check=True)
    (archive,) = (folder / "dist").iterdir()
    shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def build_wheel(sources: Path) -> Path:
    """By the Makefile's own command."""
    (options,) = re.findall(r"^\t\$\(PIP\) wheel (.*)$", (ROOT / "Makefile").read_text(), re.M)
    subprocess.run([*PIP, "wheel", *shlex.split(options)], cwd=sources, check=True)
    (made,) = (sources / "dist").glob("*.whl")
    return made


def environment() -> dict[str, str]:
    """This process's, without PYTHONPATH: a checkout in it would pass for an installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def install(wheel: Path, folder: Path) -> Path:
    """The folder of programs of a new environment, which has the wheel and sees the packages of
    this one. vLLM's command is there, too."""
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    into = ["--python", str(programs / "python"), "install", "--no-deps", str(wheel)]
    subprocess.run([*PIP, *into], env=environment(), check=True)
    (own,) = folder.glob("lib/*/site-packages")
    (own / "others.pth").write_text(sysconfig.get_path("purelib"))
    command = programs / "vllm"
    command.write_text(
        f"#!{programs / 'python'}\nfrom vllm.entrypoints.cli.main import main\n\n"
        'if __name__ == "__main__":\n    main()\n'
    )
    command.chmod(0o755)
    return programs
