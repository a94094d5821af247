"""Options that a draft service fixes for its engines."""

import msgspec

from vllm_ssd.table.draft_names import CommonOptions

COMMON_OPTIONS = CommonOptions("draft", None, None, 3, 2, "probabilistic", None, 1.0, None)


def changed(**options):
    """These options as a service of another version, or a hostile one, may publish them. None of
    an option: left out."""
    all_of_them = {**msgspec.structs.asdict(COMMON_OPTIONS), **options}
    return {name: value for name, value in all_of_them.items() if options.get(name, 0) is not None}
