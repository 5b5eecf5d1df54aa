"""The Ray actor that serves the embedded engine: the methods that verl calls on a rollout server.

Options of ``rollout.engine_kwargs.opsd``: ``kv_cache_bytes`` (bytes of all kept caches), ``prefill_chunk`` (prompt
tokens a step), ``threads`` (of torch, in this process), and ``script`` (scripted backend only).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from verl_opsd.errors import OpsdError
from verl_opsd.models import multimodal
from verl_opsd.models.kernels import on_host
from verl_opsd.models.memory import out_of_the_file
from verl_opsd.verl_adapter.rollout import weights
from verl_opsd.verl_adapter.rollout.engine_core import EngineCore, Reply, Request
from verl_opsd.verl_adapter.rollout.engine_thread import EngineThread
from verl_opsd.verl_adapter.rollout.kv import ATTENTION, attends_to_whole_past
from verl_opsd.verl_adapter.rollout.sampling import SamplingParams

_DTYPES = {
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
}


@dataclass(frozen=True)
class EngineOptions:
    """``rollout.engine_kwargs.opsd``. ``threads=None``: the cores that this process may use but
    one, which the agents' commands run on; a thread that waits for a busy core stalls all of them."""

    kv_cache_bytes: int = 2 << 30
    prefill_chunk: int = 512
    threads: int | None = None
    script: str | None = None

    @classmethod
    def of(cls, config: RolloutConfig) -> EngineOptions:
        """Reads the options; an unknown key or a value of another kind is refused."""
        given = config.engine_kwargs.get("opsd") or {}
        values = OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else dict(given)
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))  # type: ignore[arg-type]
        if unknown:
            raise OpsdError(
                f"rollout.engine_kwargs.opsd has unknown keys {unknown}",
                f"its keys are {sorted(cls.__dataclass_fields__)}",
                "remove or rename them",
            )
        options = cls(**values)  # type: ignore[arg-type]
        for name in ("kv_cache_bytes", "prefill_chunk", "threads"):
            value = getattr(options, name)
            if not (type(value) is int and value > 0) and (name, value) != ("threads", None):
                raise OpsdError(
                    f"rollout.engine_kwargs.opsd.{name}={value!r}", "it is a whole number above 0", "correct the value"
                )
        return options


def check_rollout_config(config: RolloutConfig) -> None:
    """Refuses settings that this backend would otherwise ignore.

    Raises:
        OpsdError: model parallelism, or an element type that is not served.
    """
    ranks = (config.tensor_model_parallel_size, config.data_parallel_size, config.pipeline_model_parallel_size)
    if ranks != (1, 1, 1):
        raise OpsdError(
            f"rollout.name={config.name} with tensor, data, pipeline parallel sizes {ranks}",
            "an embedded replica is one process: one replica for each rank of the student",
            "set actor_rollout_ref.rollout.tensor_model_parallel_size=1 (and the other two)",
        )
    if config.dtype not in _DTYPES:
        raise OpsdError(f"rollout.dtype={config.dtype}", f"the dtype is one of {sorted(_DTYPES)}", "use float32")


class EmbeddedServer:
    """One replica's server. All methods run on the actor's event loop; the model runs in the engine's thread.

    Args:
        config: verl's rollout config (dataclass or DictConfig).
        model_config: verl's model config (dataclass or DictConfig).
        replica_rank: rank of the replica.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int):
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        check_rollout_config(self.config)
        self.options = EngineOptions.of(self.config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config)
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        self._report: weights.UpdateReport | None = None
        self._next_turn: dict[str, int] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._reject = False
        torch.set_num_threads(self.options.threads or max(1, len(os.sched_getaffinity(0)) - 1))
        self.max_model_len = self._max_model_len()
        self._core = EngineCore(
            self._load_model(),
            eos_ids=self._eos_ids(),
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            prefill_chunk=self.options.prefill_chunk,
            kv_cache_bytes=self.options.kv_cache_bytes,
            seed=self.config.seed,
        )
        self._engine = EngineThread(self._core)

    def _load_model(self) -> torch.nn.Module:
        hf_config = multimodal.text_config(self.model_config.hf_config)
        flat = attends_to_whole_past(hf_config.get_text_config())
        model = AutoModelForCausalLM.from_pretrained(
            str(self.model_config.local_path),
            config=hf_config,
            dtype=_DTYPES[self.config.dtype],
            attn_implementation=ATTENTION if flat else "sdpa",
            trust_remote_code=self.model_config.trust_remote_code,
        )
        on_host(model)
        out_of_the_file(model)
        return model.eval().requires_grad_(False)

    def _max_model_len(self) -> int:
        limit = int(self.model_config.hf_config.get_text_config().max_position_embeddings)
        asked = self.config.max_model_len or limit
        if asked > limit:
            raise OpsdError(
                f"rollout.max_model_len={asked}",
                f"the model at {self.model_config.local_path} has {limit} positions",
                "lower max_model_len",
            )
        return int(asked)

    def _eos_ids(self) -> set[int]:
        given = getattr(self.model_config.generation_config, "eos_token_id", None)
        ids = set(given) if isinstance(given, list) else {given}
        return {int(i) for i in ids | {self.model_config.tokenizer.eos_token_id} if i is not None}

    # ---- data plane ----

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        session: str | None = None,
        turn: int | None = None,
    ) -> TokenOutput:
        """One turn: token ids in, token ids out.

        Args:
            prompt_ids: ids of the whole prompt; what the session's cache already holds is not computed again.
            sampling_params: as verl sends them (see `SamplingParams`).
            request_id: unique id of the request.
            image_data, video_data: refused; the engine serves text.
            session: whose cache to continue. With ``turn`` it also fixes the random numbers.
            turn: index of the turn; by default counted by the server for each session.

        Returns:
            TokenOutput with ``stop_reason`` completed (stop token included) | length | aborted.

        Raises:
            OpsdError: a request that can't be served as asked. InfraFault ``engine_died``: the engine is gone.
        """
        if image_data or video_data:
            raise OpsdError("a request with images or videos", "the embedded engine serves text", "use rollout.name=vllm")
        await self._admitted()
        if self._reject:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self.global_steps})
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        params = SamplingParams.parse(sampling_params, self._default_max_tokens(len(prompt)))
        if session is not None:
            turn = self._next_turn.get(session, 0) if turn is None else turn
            self._next_turn[session] = turn + 1
        request = self._request(Request(request_id, prompt, params, session, turn or 0))
        reply = await asyncio.wrap_future(self._engine.generate(request))
        return self._output(reply, params)

    def _request(self, request: Request) -> Request:
        """Hook of the scripted server."""
        return request

    def _default_max_tokens(self, prompt_len: int) -> int:
        """verl's own default where a request names no limit: the response length, within the episode and the model."""
        c = self.config
        return min(c.response_length, c.prompt_length + c.response_length - prompt_len, self.max_model_len - prompt_len)

    def _output(self, reply: Reply, params: SamplingParams) -> TokenOutput:
        return TokenOutput(
            token_ids=reply.token_ids,
            log_probs=reply.logprobs if params.logprobs else None,
            stop_reason=reply.stop_reason,
            num_preempted=0,
            extra_fields={"global_steps": self.global_steps, "num_cached_tokens": reply.cached_tokens},
        )

    async def score_logprobs(self, sequences: list[list[int]], positions: list[list[int]]) -> list[NDArray[np.float32]]:
        """float32 (P, V) log-softmax for each sequence, from the weights that are served now (see `EngineCore`)."""
        return await asyncio.wrap_future(self._engine.call(lambda core: core.score_logprobs(sequences, positions)))

    # ---- weights ----

    async def load_adapter(
        self, tensors: dict[str, torch.Tensor], peft_config: dict[str, Any], global_steps: int | None
    ) -> weights.UpdateReport:
        """Publishes an adapter between two requests (running ones end first, on the old weights)."""

        def update(core: EngineCore) -> weights.UpdateReport:
            core.drop_caches()
            core.model, report = weights.load_adapter(core.model, tensors, peft_config, global_steps)
            return report

        return await self._update(update, global_steps)

    async def load_full(self, tensors: dict[str, torch.Tensor], global_steps: int | None) -> weights.UpdateReport:
        """Publishes full base weights between two requests."""

        def update(core: EngineCore) -> weights.UpdateReport:
            core.drop_caches()
            return weights.load_full(core.model, tensors, global_steps)

        return await self._update(update, global_steps)

    async def _update(self, update: Any, global_steps: int | None) -> weights.UpdateReport:
        report: weights.UpdateReport = await asyncio.wrap_future(self._engine.call(update, when="idle"))
        self._report = report
        if global_steps is not None:
            self.global_steps = global_steps
        return report

    async def adapter_report(self) -> dict[str, Any] | None:
        """The last update as plain values (fields of `UpdateReport`); None before the first."""
        return None if self._report is None else dataclasses.asdict(self._report)

    async def counters(self) -> dict[str, int]:
        """The engine's counters, and the bytes that its caches hold."""

        def read(core: EngineCore) -> dict[str, int]:
            return {**dataclasses.asdict(core.counters), "kv_bytes": core.store.nbytes}

        return await asyncio.wrap_future(self._engine.call(read))

    # ---- control plane ----

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to map back: the host keeps the weights."""

    async def sleep(self) -> None:
        """Gives the caches' memory to the trainer once the running requests are done."""
        await self.clear_kv_cache()

    async def clear_kv_cache(self) -> None:
        await asyncio.wrap_future(self._engine.call(EngineCore.drop_caches, when="idle"))

    async def release_kv_cache(self) -> None:
        await self.clear_kv_cache()

    async def resume_kv_cache(self) -> None:
        """Caches are allocated on demand."""

    async def wait_for_requests_to_drain(self) -> None:
        await asyncio.wrap_future(self._engine.call(lambda core: None, when="drained"))

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends what is in flight and holds (or rejects) what arrives, until `resume_generation`."""
        self._open.clear()
        self._reject = reject_request
        if reject_request:
            self._open.set()
        ids = await asyncio.wrap_future(self._engine.abort_all())
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        self._reject = False
        self._open.set()

    async def _admitted(self) -> None:
        while not self._open.is_set():  # it may be closed again before a waiter wakes up
            await self._open.wait()

    async def start_profile(self, **kwargs: Any) -> None:
        """No engine profiler; verl's own profiler covers the trainer."""

    async def stop_profile(self) -> None:
        """See `start_profile`."""

    async def get_address(self) -> str:
        """``ip:pid``, unique for each server: verl's load balancer tells replicas apart by it."""
        return f"{ray.util.get_node_ip_address()}:{os.getpid()}"
