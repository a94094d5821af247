"""``vllm-ssd draft --listen``: the draft's end of relays, beside the draft that it is about."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from vllm_ssd.log import get_logger
from vllm_ssd.protocol.draft_names import DraftName
from vllm_ssd.relay.draft_end import DraftEndSpec
from vllm_ssd.relay.keys import addresses_of, make_keys, read_keys, write_keys
from vllm_ssd.relay.process import Child

logger = get_logger(__name__)

START_S = 30.0
AGAIN_S = 1.0  # between two starts of a relay that has ended


def prepare_keys(path: Path, name: str, address: str, drafts: int) -> None:
    """Make the key file unless it is there, with this address and the ports after it;
    ``ValueError`` with a sentence if that fails or if it is another service's."""
    addresses = addresses_of(address, drafts)
    try:
        if not path.exists():
            write_keys(path, make_keys(name, addresses, shared=True))
            return
        keys = read_keys(path)
        if (keys.name, keys.addresses) != (name, addresses):
            raise ValueError(
                f"{path} is the key file of {keys.name!r} at {', '.join(keys.addresses)}: name "
                "another file, or remove this one and copy the new one to the engines' nodes"
            )
    except OSError as error:
        raise ValueError(
            f"the key file {path} cannot be written ({error.strerror}): name one in a folder of "
            "this user's"
        ) from error


class ListeningEnd:
    """Of one draft. ``look`` at it now and then, until ``stop``."""

    def __init__(
        self, run_dir: Path, named: DraftName, key_file: Path, place: int, max_num_seqs: int
    ):
        """run_dir: of the draft; place: its own among the addresses of the key file, where a port
        of 0 becomes the right one; max_num_seqs: as of ``DraftEndSpec``. ``ValueError`` with a
        sentence if it cannot listen."""
        self._folder = run_dir
        path = str(key_file.absolute())
        self._spec = DraftEndSpec(str(run_dir), named, path, place, max_num_seqs)
        self._next_start = 0.0
        self._child = self._start()
        keys = read_keys(key_file)
        addresses = list(keys.addresses)
        if addresses[place].endswith(":0"):
            addresses[place] = addresses[place].removesuffix("0") + self._child.word
            write_keys(key_file, msgspec.structs.replace(keys, addresses=addresses))

    def look(self) -> None:
        """Start it again if it has ended; the engines come by themselves."""
        if not self._child.ended or time.monotonic() < self._next_start:
            return
        logger.error("SSD: the relay to engines on other nodes has ended and is started again")
        self._next_start = time.monotonic() + AGAIN_S
        self._child.stop()
        try:
            self._child = self._start()
        except (OSError, ValueError) as error:
            logger.error("SSD: the relay could not be started again: %s", error)

    def stop(self) -> None:
        """What it mirrors goes with it."""
        self._child.stop()

    def _start(self) -> Child:
        return Child("vllm_ssd.relay.draft_end", self._spec, self._folder, START_S)
