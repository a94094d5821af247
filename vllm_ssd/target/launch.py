"""The engine core's side of the draft's life: start it, wait for it, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ssd import rundir
from vllm_ssd.cores import available_cores, split_cores
from vllm_ssd.draft.spec import (
    SPEC_FILE,
    DraftModelSpec,
    DraftPolicy,
    KeeperSpec,
    ServerSpec,
)
from vllm_ssd.log import get_logger
from vllm_ssd.placement import (
    engine_index,
    gpu_environment,
    place_draft,
    place_target_by_ray,
    reserve_gpu_by_ray,
)
from vllm_ssd.table import SpeculationTable, TableShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

_SHARED_KV_CACHE_GIB = 1.0  # where not all memory is the draft's
STOP_S = 15.0  # the keeper's own steps take less


class DraftLauncher:
    """One per engine core. ``start``, then ``wait_ready``; ``stop`` at any time, any number of
    times. The keeper it starts ends with it, even if it is killed."""

    def __init__(self, vllm_config: VllmConfig):
        self._vllm_config = vllm_config
        self._config: Any = vllm_config.speculative_config
        self._channel: socket.socket | None = None
        self._locks: list[int] = []
        self._stopping = False
        self._awaited = "the keeper"  # what the draft's start is about
        self._started = False
        self._may_share_gpu = False
        self._reserved: Any = None  # the draft's GPU, where vLLM's Ray gives them out
        self._words: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def start(self) -> None:
        """Make the table and set the draft server off; returns before it is up, unless it may
        share a GPU with the target."""
        rundir.sweep()
        self._run_dir, lock = rundir.create()
        self._locks.append(lock)
        self._config.run_dir = str(self._run_dir)
        shape = TableShape(
            slots=self._vllm_config.scheduler_config.max_num_seqs,
            k=self._config.k,
            branches=max(self._config.max_branches, 1),
            top_m=self._config.top_m,
        )
        try:
            SpeculationTable.create(rundir.table_path(self._run_dir), shape)
            self._locks.append(rundir.hold_table(self._run_dir))
        except OSError as error:
            size = SpeculationTable.size_of(shape) / 2**20
            raise RuntimeError(
                f"SSD: no room for the speculation table ({size:.1f} MiB of shared memory: "
                f"{error}): free some, or in a container raise --shm-size"
            ) from error
        policy = self._policy()
        device = self._device()
        server = ServerSpec(str(self._run_dir), self._model_spec(policy), policy, *device)
        spec = KeeperSpec(server, self._config.start_timeout_s, self._config.max_restarts)
        (self._run_dir / SPEC_FILE).write_bytes(msgspec.json.encode(spec))
        self._channel, theirs = socket.socketpair()
        keeper = [sys.executable, "-m", "vllm_ssd.draft.keeper"]
        with theirs:
            # Returns at once: the keeper detaches itself, lest it be killed with this process.
            subprocess.run(
                [*keeper, str(self._run_dir), str(theirs.fileno())],
                pass_fds=(theirs.fileno(), lock),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                check=True,
            )
        self._listener = threading.Thread(target=self._listen, name="ssd-keeper", daemon=True)
        self._listener.start()
        if self._may_share_gpu:
            # A worker looks at the free memory when it starts and again when it has run once, and
            # counts as the target's own what has gone in between: the draft must have taken all
            # of its memory before the first look. Elsewhere both load at the same time.
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until the draft is loaded; ``RuntimeError`` with a sentence if that fails, unless serving
        without drafts will do."""
        if self._started:
            return
        timeout_s = self._config.start_timeout_s
        try:
            kind, text = self._words.get(timeout=timeout_s)
        except queue.Empty:
            kind = "failed"
            text = f"{self._awaited} was not ready within {timeout_s:g} s (start_timeout_s)"
        if kind == "ready":
            logger.info("SSD: %s", text)
        elif self._config.required:
            self.stop()
            raise RuntimeError(f"SSD: the draft could not be started: {text}")
        else:
            logger.error(
                "SSD: the draft could not be started: %s; serving begins without drafts, as "
                "required is false",
                text,
            )
        self._started = True

    def begin_stop(self) -> None:
        """Have the draft taken down, and do not wait for it."""
        self._stopping = True
        if self._channel is not None:
            with contextlib.suppress(OSError):  # the keeper may have ended before
                self._channel.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Take the draft down and leave nothing behind."""
        self.begin_stop()
        if self._channel is not None:
            self._listener.join(STOP_S)
            self._channel = None
        if self._locks:
            rundir.remove(self._run_dir)
        while self._locks:
            os.close(self._locks.pop())
        self._reserved = None

    def _listen(self) -> None:
        """Pass on the keeper's words until it ends."""
        assert self._channel is not None
        with self._channel.makefile("rb") as words:
            for line in words:
                (kind, text), *_ = json.loads(line).items()
                if kind == "lost":
                    logger.error(
                        "SSD: the draft is lost (%s); serving goes on without drafts while it is "
                        "started again",
                        text,
                    )
                elif kind == "not_back":
                    logger.error(
                        "SSD: the draft could not be started again (%s); it is tried once more",
                        text,
                    )
                elif kind == "awaited":
                    self._awaited = text
                elif kind == "back" or (kind == "ready" and self._started):
                    logger.warning("SSD: the draft is back: %s", text)
                elif kind == "given_up":
                    logger.error(
                        "SSD: the draft is lost (%s) and is not started again (max_restarts is "
                        "%d); serving goes on without drafts: see above what it dies of, and start "
                        "the engine anew to have drafts",
                        text,
                        self._config.max_restarts,
                    )
                else:
                    self._words.put((kind, text))
        self._words.put(("ended", "its keeper process ended; see the log above"))
        if not self._stopping:
            logger.error("SSD: the draft's keeper is gone; serving goes on without drafts")

    def _policy(self) -> DraftPolicy:
        config = self._config
        return DraftPolicy(
            k=config.k,
            fan_out=config.fan_out,
            answer_depth=config.min_depth if config.on_miss != "skip" else 0,
            chunk=config.draft_max_num_batched_tokens,
            adaptive=isinstance(config.f, int) and config.f > 0,
            top_m=config.top_m,
            saguaro=config.saguaro,
            seed=self._vllm_config.model_config.seed % 2**32,
        )

    def _model_spec(self, policy: DraftPolicy) -> DraftModelSpec:
        from vllm.platforms import current_platform

        config, draft = self._config, self._config.draft_model_config
        load = config.draft_load_config or self._vllm_config.load_config
        engine_args = {
            "model": draft.model,
            "tokenizer": draft.tokenizer,
            "skip_tokenizer_init": True,
            "dtype": str(draft.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "revision": draft.revision,
            "code_revision": draft.code_revision,
            "trust_remote_code": draft.trust_remote_code,
            "quantization": config.quantization,
            "load_format": load.load_format,
            "download_dir": load.download_dir,
            "seed": draft.seed,
            "enforce_eager": True,
            "max_num_seqs": self._vllm_config.scheduler_config.max_num_seqs,
        }
        scheduler = self._vllm_config.scheduler_config
        memory = config.draft_kv_cache_gib
        if memory is None and (current_platform.is_cpu() or self._may_share_gpu):
            memory = _SHARED_KV_CACHE_GIB
        return DraftModelSpec(
            engine_args=engine_args,
            tree_backend=config.resolve_tree_backend(current_platform),
            vocab_size=self._vllm_config.model_config.get_vocab_size(),
            kv_cache_bytes=None if memory is None else int(memory * 2**30),
            max_requests=scheduler.max_num_seqs,
            scratch=policy.scratch,
        )

    def _device(self) -> tuple[list[int], dict[str, str]]:
        """The draft's cores, on a CPU machine, and its process's environment."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            cores = self._cores()
            return cores, {"OMP_NUM_THREADS": str(len(cores))}
        return [], gpu_environment(self._gpu(current_platform), current_platform.is_rocm())

    def _gpu(self, platform: Any) -> int | str:
        """The draft's GPU, chosen without a look at CUDA: workers may be forked later on."""
        config, parallel = self._config, self._vllm_config.parallel_config
        if parallel.use_ray:
            place_target_by_ray(parallel)
            if config.draft_device is None:
                self._reserved, name = reserve_gpu_by_ray(platform)
                return name
            logger.warning(
                "SSD: Ray does not know that the draft runs on draft_device %s and may give this "
                "GPU to the target too, which is for development only: leave draft_device out to "
                "let Ray choose a GPU for the draft alone",
                config.draft_device,
            )
        engine = engine_index(parallel)
        place = place_draft(config, parallel, platform, engine)
        self._may_share_gpu = place.with_target or parallel.use_ray
        if place.with_target:
            logger.warning(
                "SSD: draft_device %s is a GPU of the target: both share its time and its memory, "
                "which is for development only, and --gpu-memory-utilization must leave room for "
                "the draft's weights and its %g GiB of KV cache (draft_kv_cache_gib)",
                place.device,
                config.draft_kv_cache_gib or _SHARED_KV_CACHE_GIB,
            )
        if place.with_drafts and engine == 0:
            logger.warning(
                "SSD: the drafts of several engines share one GPU, its time and its memory: name "
                'one for each in draft_device, as in "4,5"'
            )
        return place.device

    def _cores(self) -> list[int]:
        """The draft's cores. The target's workers are bound to the others."""
        bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
        device = self._config.draft_device
        parallel = self._vllm_config.parallel_config
        split = split_cores(
            available_cores(),
            parallel.world_size,
            None if device is None else str(device),
            None if bind in ("auto", "nobind") else bind,
            engine_index(parallel),
            self._config.engines,
        )
        if split.target is not None:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = split.target
        if split.shared:
            logger.warning("SSD: too few cores: target and draft share some, and will be slow")
        return split.draft
