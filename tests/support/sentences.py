"""What users read."""


def one_sentence(error) -> str:
    """What a caught exception says, which is one sentence."""
    text = str(error.value)
    assert "\n" not in text
    assert ". " not in text
    return text
