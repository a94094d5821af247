"""What users read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(*parts: str, kind: type[Exception] = ValueError) -> Iterator[Any]:
    """What is done meanwhile is refused with this kind of error: one sentence with these parts."""
    with pytest.raises(kind) as error:
        yield error
    assert type(error.value) is kind, "a page of pydantic's, for example"
    said = str(error.value)
    assert "\n" not in said
    assert ". " not in said
    assert '": ' not in said, "check takes what follows the last ': ' for the remedy"
    assert all(part in said for part in parts), said
