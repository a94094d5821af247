"""The actor that runs one draft of ``vllm-ssd draft`` on the node of a Ray cluster."""

from __future__ import annotations

import argparse

from vllm_ssd.bridge.site import Site
from vllm_ssd.service.cores import take_niceness_of_others
from vllm_ssd.service.keeper import keep_in_thread
from vllm_ssd.tools.draft_server.configs import make_configs
from vllm_ssd.tools.draft_server.serving import LocalDrafts


class DraftOnNode(Site):
    """Call ``node`` and ``serve``, then ``tend`` now and then, and ``stop`` at any time."""

    _drafts: LocalDrafts | None = None

    def node(self) -> str:
        """This node's address in Ray."""
        import ray

        return str(ray.util.get_node_ip_address())

    def serve(self, args: argparse.Namespace) -> None:
        """Load the draft that the flags in ``args`` describe. Raises ``ValueError`` or
        ``RuntimeError`` with a sentence if that fails."""
        take_niceness_of_others()
        self._drafts = drafts = LocalDrafts(make_configs(args), args.name, keep_in_thread)
        try:
            drafts.start()
            self.open(drafts.run_dirs[0], drafts.options, drafts.max_num_seqs)
            drafts.wait_ready()
        except BaseException:
            self.stop()
            raise

    def tend(self, seconds: float) -> bool:
        """End silent sessions; returns False if the draft is lost for good. seconds: see there."""
        self.end_silent(seconds)
        return self._drafts is not None and self._drafts.tend()

    def stop(self) -> None:
        """Also end the draft and remove its files on this node."""
        super().stop()
        if self._drafts is not None:
            self._drafts.stop()
