"""Draft services are found by their names as long as they live."""

import json
import stat

import pytest

from tests.support.common_options import COMMON_OPTIONS, changed
from tests.support.sentences import refused
from tests.unit.conftest import close
from vllm_ssd.table.draft_names import DraftName, NoDraftServer, find_all, publish


def test_a_name_is_found_until_its_service_is_gone(make_run_dir):
    run_dir, locks = make_run_dir()
    named = DraftName("one", COMMON_OPTIONS)
    publish(run_dir, named)
    assert find_all("one") == [(run_dir, named)]
    (file,) = [path for path in run_dir.iterdir() if "server" in path.name]
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700 and file.is_file()
    close(locks)
    with refused("has no draft server 'one'", kind=NoDraftServer):
        find_all("one")


def test_a_name_that_is_taken(make_run_dir):
    (first, locks), (second, _) = make_run_dir(), make_run_dir()
    publish(first, DraftName("one", None))
    with refused(f"there is a draft server 'one' already, in {first}"):
        publish(second, DraftName("one", None))
    close(locks)
    publish(second, DraftName("one", None))
    assert find_all("one")[0][0] == second


@pytest.mark.parametrize(
    "published, named_field",  # the words around the field are msgspec's, and change with it
    [
        ('{"name": 5}', "$.name"),
        ('{"more": ' + "[" * 100_000, ""),
        (b'{"name": "\xff"}', ""),
        ({"k": "3"}, "$.options.k"),
        ({"saguaro": None}, "saguaro"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method"),
    ],
)
def test_a_service_of_another_version_is_none(make_run_dir, published, named_field):
    if isinstance(published, dict):
        named = {"name": "two", "options": changed(**published), "service": "a"}
        published = json.dumps(named)
    if isinstance(published, str):
        published = published.encode()
    run_dir, _ = make_run_dir()
    (run_dir / "draft-server.json").write_bytes(published)
    publish(make_run_dir()[0], DraftName("one", None))
    assert len(find_all("one")) == 1
    with refused(
        f"another version of vllm-ssd runs the one in {run_dir} (", named_field, kind=NoDraftServer
    ):
        find_all("two")


def test_those_that_are_there_are_listed(make_run_dir):
    for name in ("two", "dp:1", "one"):
        publish(make_run_dir()[0], DraftName(name, None))
    with pytest.raises(ValueError, match=r"\(running in .*: (?!.*dp).*one, .*two"):
        find_all("three")
