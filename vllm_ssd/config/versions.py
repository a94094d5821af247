"""Which vLLM this package works with."""

from __future__ import annotations

SUPPORTED = ">=0.32,<0.34"


def version_mismatch() -> str | None:
    """The sentence that says why this version of vLLM is not supported; None if it is."""
    import vllm
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        # A build's own suffix (+cpu, +cu130) and pre-releases of a supported version are fine.
        supported = SpecifierSet(SUPPORTED).contains(Version(vllm.__version__), prereleases=True)
    except InvalidVersion:
        supported = False
    if supported:
        return None
    return (
        f"the speculative method 'ssd' supports vLLM {SUPPORTED} and this is vLLM "
        f"{vllm.__version__}: install a supported vLLM or another version of vllm-ssd"
    )
