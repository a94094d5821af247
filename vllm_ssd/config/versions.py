"""The versions of vLLM that this package supports."""

from __future__ import annotations

SUPPORTED = ">=0.32,<0.34"
# vLLM 0.32 schedules asynchronously for its own speculative methods only; GPUs gain much from it.
SUPPORTED_ON_GPUS = ">=0.33,<0.34"


def version_mismatch(on_gpus: bool = False) -> str | None:
    """A sentence that says why this version of vLLM is not supported; None if it is. on_gpus:
    whether the target runs on GPUs, which support fewer versions."""
    import vllm
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    versions = SUPPORTED_ON_GPUS if on_gpus else SUPPORTED
    try:
        # Builds with a suffix (+cpu, +cu130) and pre-releases of a supported version are accepted.
        supported = SpecifierSet(versions).contains(Version(vllm.__version__).base_version)
    except InvalidVersion:
        supported = False
    if supported:
        return None
    return (
        f"the speculative method 'ssd' supports vLLM {versions}{' on GPUs' * on_gpus} and this is "
        f"vLLM {vllm.__version__}: install a supported vLLM or another version of vllm-ssd"
    )
