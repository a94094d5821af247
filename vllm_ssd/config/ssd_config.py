"""``SSDConfig``: the user's options for the speculative method ``ssd``.

It extends vLLM's ``SpeculativeConfig``, so vLLM passes it to every process unchanged. This module
must not need the plugin: spawned processes unpickle the config before vLLM loads plugins.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.utils import config
from vllm.platforms import current_platform
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_ssd.config import draft_checks
from vllm_ssd.config.default_drafts import default_draft, default_k_and_f
from vllm_ssd.config.shared_tokens import shared_tokens
from vllm_ssd.draft.attention.registry import (
    Backend,
    TreeBackend,
    default_tree_backend,
    resolve_tree_backends,
)
from vllm_ssd.service.errors import first_sentence

if TYPE_CHECKING:
    from vllm.platforms.interface import Platform

MAX_FAN_OUT = 64
MAX_BRANCHES = 512
MAX_TOP_M, DEFAULT_TOP_M = 128, 32

DeviceIndex = Annotated[int, Field(strict=True, ge=0)]
# One core list such as "2-3,6" or several as in "2-3|6"; the index or UUID of one visible GPU, or
# several as in "4,5".
_NAME = r"(\d+(-\d+)?|(GPU|MIG)-[0-9A-Za-z/-]+)"
DeviceName = Annotated[str, Field(strict=True, pattern=rf"^{_NAME}([,|]{_NAME})*$")]

_above_0: Any = partial(
    Field, strict=True, gt=0, le=1e9, description="a number above 0, at most 1e9"
)
_switch: Any = partial(Field, strict=True, description="true or false")


def _whole(default: int | None, least: int, most: int | None = None) -> Any:
    said = f"a whole number from {least}" + (f" to {most}" if most else "")
    return Field(default=default, strict=True, ge=least, le=most, description=said)


@config
class SSDConfig(SpeculativeConfig):
    """Configuration of the speculative method ``ssd``.

    A bad value raises ``ValueError``; a field's ``description`` completes "<option> must be ...".
    """

    if TYPE_CHECKING:  # inherited
        model: str | None
        draft_model_config: ModelConfig | None

    method: Literal["ssd", "custom_class"] | None = "ssd"
    """Becomes "custom_class" when the engine config is complete and vLLM's V1 runner will run. That
    runner finds proposers by class only; ``model`` then holds the class."""
    k: int = _whole(None, 1, 16)
    """Draft tokens per round. Default: ``default_k_and_f``."""
    f: int = _whole(None, 0, MAX_FAN_OUT)
    """Predicted bonus tokens for each accepted length 0..k, in the mean. 0: no drafting ahead, only
    speculation with a draft on its own device. Default: ``default_k_and_f``."""
    draft_model: str = ""
    """The draft's path or hub name: ``model`` as the user gave it, or the target's default."""
    draft_server: str | None = Field(
        default=None,
        strict=True,
        description="the --name of a draft that was started with 'vllm-ssd draft'",
    )
    """Name of the draft service that this engine joins. None: the engine starts its own draft. The
    service fixes some options for all its engines (``config/draft_server.py``)."""
    ray_address: str | None = Field(
        default=None, strict=True, description='the address of a Ray cluster, "auto" or "HOST:PORT"'
    )
    """Address of the Ray cluster in which ``draft_server`` runs. None: it runs on this node."""
    draft_device: DeviceIndex | DeviceName | None = Field(
        default=None,
        description='the index or UUID of a visible GPU, or on CPUs a core list such as "2-3,6"',
    )
    """Device of the draft. None: a device that the target does not use. With data parallelism all
    engines of this host share one draft, unless the option names one device for each engine: GPUs
    separated by commas, core lists separated by |."""
    tree_backend: TreeBackend = Field(
        default_factory=default_tree_backend, description='"auto", "triton", "flashinfer" or "sdpa"'
    )
    """The draft's attention backend. Default: the value of the environment variable
    SSD_TREE_DECODE_BACKEND, else "auto"."""
    on_miss: Literal["auto", "wait", "skip"] = Field(
        default="auto", description='"auto", "wait" or "skip"'
    )
    """Action of the target when its outcome was not predicted or too few tokens of the branch are
    ready. "wait": wait for the draft. "skip": verify the tokens that are ready. "auto": do what
    yields the most tokens a second (``worker/waiting.py``)."""
    enable_adaptive_verification: bool | None = _switch(default=None)
    """Whether vLLM verifies only the likeliest draft tokens of a batch, as many as pay. Default:
    true where vLLM can do so (``config/verification.py``)."""
    max_wait_ms: float = _above_0(default=None)
    """The longest wait of one step, in milliseconds. Default: 2000 on CPUs, 100 on GPUs."""
    draft_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description='"auto", "float32", "bfloat16" or "float16"'
    )
    """The draft's data type; "auto" is the target's."""
    draft_max_num_batched_tokens: int = _whole(None, 32, 65536)
    """Prompt tokens that the draft reads in one forward, between two rounds. Default: 64 on CPUs,
    512 on GPUs."""
    draft_kv_cache_gib: float | None = _above_0(default=None)
    """Most memory for the draft's KV cache, in GiB. Default: 1 on CPUs and on a GPU shared with the
    target; else enough for all requests at their longest, if there is room."""
    start_timeout_s: float = _above_0(default=600.0)
    """Timeout of the draft's first start and of each restart, in seconds."""
    vocabulary: Literal["same", "intersection"] = Field(
        default="same", description='"same" or "intersection"'
    )
    """"intersection": the draft may have another vocabulary. It proposes tokens that both have."""
    draft_ids: tuple[int, ...] | None = None
    """``shared_tokens`` for the option "intersection", else None; set with the config."""
    required: bool = _switch(default=True)
    """Whether the engine refuses to serve if the draft cannot be started."""
    max_restarts: int = _whole(3, 0)
    """Consecutive restarts allowed for a draft that dies or hangs. The count resets after 60 s of
    healthy service. 0: serving goes on without drafts."""
    schedule: list[tuple[int, int, int]] | None = None
    """The user's ``num_speculative_tokens_per_batch_size``. vLLM removes that option from a config
    for the V1 runner, where ssd follows this copy."""
    asked_for_adaptive_verification: bool = False
    """Whether the user set ``enable_adaptive_verification`` to true. Set with the config."""
    model_named_here: bool = True
    """Whether the user named the model to this engine, with its revisions, or a draft server did.
    Set with the config."""
    run_dir: str = ""
    """The engine's private directory (``table/rundir.py``); set when the draft is launched."""
    run_dirs: dict[int, str] = Field(default_factory=dict)
    """In a frontend: run directories of its engines, by their index in the data parallel group."""
    engines: int = 1
    """Engines on this host; set when the config is made."""
    own_draft: str = ""
    """Name of the draft service that this host's engines start themselves, "" = they join another
    service; set when the config is made."""
    share_draft: bool = False
    """Whether these engines share one draft or start one each; set when the config is made."""

    draft_tensor_parallel_size: Literal[1] | None = Field(
        default=1, description="1, as the draft runs on one device"
    )
    max_model_len: int | None = _whole(None, 1)
    """Longest text that the draft reads. Default: the shorter of both models' limits."""
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="probabilistic", description='"greedy" or "probabilistic"'
    )
    """How draft tokens are sampled. "greedy": the likeliest token. "probabilistic": from the
    draft's distribution at the request's temperature, which it reports. The text is exact with
    both. "probabilistic" has a longer accepted length for requests with a temperature."""
    draft_top_m: int | None = _whole(None, 1, MAX_TOP_M)
    """If "probabilistic": number of likeliest tokens from which a draft token is sampled. They are
    reported with their probabilities. Default: 32."""
    saguaro: float = Field(
        default=1.0, strict=True, gt=0, le=1, description="a number above 0, at most 1"
    )
    """If "probabilistic": factor on the draft's probabilities of the predicted bonus tokens. Below
    1, the target accepts fewer draft tokens and more rounds hit."""
    rejection_sample_method: Literal["standard", "synthetic"] = Field(
        default="standard", description='"standard" or "synthetic" in this version'
    )
    """An option of vLLM. "synthetic" accepts drafts at given rates and is for measurements."""

    def __post_init__(self) -> None:
        # vLLM's own __post_init__ is not called: it refuses methods that it does not know.
        on_cpu = current_platform.is_cpu()
        verifies_all = self.enable_adaptive_verification is False
        self.k, self.f = default_k_and_f(self.k, self.f, on_cpu, verifies_all)
        self.num_speculative_tokens = self.k
        self.asked_for_adaptive_verification |= self.enable_adaptive_verification is True
        if self.num_speculative_tokens_per_batch_size is not None:
            self.schedule = validate_and_normalize_dynamic_sd_schedule(
                [list(entry) for entry in self.num_speculative_tokens_per_batch_size]
            )
        self._check_branches()
        self._check_sampling()
        self.max_wait_ms = self.max_wait_ms or (2000.0 if on_cpu else 100.0)
        if self.draft_max_num_batched_tokens is None:
            self.draft_max_num_batched_tokens = 64 if on_cpu else 512
        if self.draft_model_config is None and self.target_model_config is not None:
            self._add_draft()
        if self.draft_server is None:
            self.resolve_tree_backends(current_platform)  # raises if none can be used

    def __repr__(self) -> str:
        draft = self.draft_model or self.model
        return f"SSDConfig({draft=}, k={self.k}, f={self.f}, on_miss={self.on_miss!r})"

    @property
    def max_branches(self) -> int:
        """Most branches of one request in a round. In its first round they all belong to the end of
        the prompt, the only position."""
        return self.f * (self.k + 1)

    @property
    def top_m(self) -> int:
        """Tokens in the distribution reported with every draft token; 0 = none is reported."""
        if self.draft_sample_method == "greedy":
            return 0
        return min(self.draft_top_m or DEFAULT_TOP_M, self.target_model_config.get_vocab_size())

    def resolve_tree_backends(self, platform: Platform) -> tuple[Backend, ...]:
        """Attention backends that ``tree_backend`` allows on this platform, the preferred one
        first; ``ValueError`` if there is none."""
        return resolve_tree_backends(self.tree_backend, self.draft_model_config, platform)

    def draft_shares_target_positions(self) -> bool:
        """Return True: a draft with a shorter context stops at its end, and the target goes on."""
        return True

    def _check_branches(self) -> None:
        if self.max_branches == 0 and self.on_miss == "skip":
            raise ValueError(
                'f=0 predicts nothing and on_miss="skip" waits for nothing, so there would never '
                "be a draft token: leave on_miss out or write an f above 0"
            )
        if self.max_branches > MAX_BRANCHES:
            raise ValueError(
                f"k={self.k} and f={self.f} make {self.max_branches} branches a round, and the "
                f"most is {MAX_BRANCHES}: lower f or k"
            )

    def _check_sampling(self) -> None:
        if self.draft_sample_method == "greedy":
            if self.draft_top_m is not None or self.saguaro != 1:
                name = "saguaro" if self.draft_top_m is None else "draft_top_m"
                raise ValueError(
                    f"{name} does nothing for drafts that are not sampled: leave out "
                    f'draft_sample_method "greedy" or {name}'
                )
            return
        if self.saguaro != 1 and not 0 < self.f < (self.draft_top_m or DEFAULT_TOP_M):
            raise ValueError(
                f"saguaro does nothing with f={self.f}: write an f above 0 and below draft_top_m, "
                "or leave saguaro out"
            )

    def _add_draft(self) -> None:
        """Make the draft's config and check that it fits the target."""
        target = self.target_model_config
        self.draft_model = (
            self.draft_model or self.model or default_draft(target.hf_text_config, target.model)
        )
        self.model = self.draft_model
        draft_checks.check_source(self.draft_model, self.revision)
        try:
            draft = ModelConfig(
                model=self.draft_model,
                runner="draft",
                tokenizer=target.tokenizer,
                tokenizer_mode=target.tokenizer_mode,
                tokenizer_revision=target.tokenizer_revision,
                # A draft server must not choose what code runs here.
                trust_remote_code=target.trust_remote_code and self.model_named_here,
                dtype=target.dtype if self.draft_dtype == "auto" else self.draft_dtype,
                seed=target.seed,
                revision=self.revision,
                code_revision=self.code_revision,
                quantization=self.quantization,
                enforce_eager=target.enforce_eager,
                spec_target_max_model_len=target.max_model_len,
            )
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            fix = 'change what vLLM names, or name another with "model" in --speculative-config'
            if not self.model_named_here:
                fix = (
                    'if it comes with code that you trust, repeat the "model" and the revisions of '
                    "the draft server in --speculative-config"
                )
            raise ValueError(
                f"vLLM cannot use {self.draft_model!r} as a draft ({first_sentence(error)}): {fix}"
            ) from error
        draft_checks.check_draft(draft)
        if self.draft_load_config is not None:
            draft_checks.check_loading(self.draft_load_config)
        if self.vocabulary == "intersection":
            self.draft_ids = shared_tokens(target, draft)
        else:
            draft_checks.check_vocabulary(target, draft, shared=self.draft_server is not None)
        limits = draft.max_model_len, target.max_model_len
        self.max_model_len = draft_checks.longest_text(self.max_model_len, *limits)
        # When one text is within k of this length, V1 stops drafting for its whole batch.
        draft.max_model_len = target.max_model_len + self.k
        self.draft_model_config = draft
        self.draft_parallel_config = ParallelConfig(distributed_executor_backend="uni")
