"""Samples with a vLLM engine: requests in, completions out as they finish, and new weights in between.

Every sample is a separate request to the engine, with its own seed. vLLM's prefix cache computes their prompt once.
Cache entries are salted with the version of the weights, so they are never used with another version.
"""

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from vllm import SamplingParams, TokensPrompt  # type: ignore[import-not-found]
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

from rlcore import (
    Completion,
    ConfigError,
    FinishReason,
    GenerateRequest,
    RlcoreError,
    Tokens,
    WeightsHandle,
    WorkerError,
)
from rlcore.contracts.sampled_row import SampledRow
from rlcore.contracts.weights import check_readable
from rlcore.errors import boundary

SEED_BITS = 62
ABORT_AGAIN_S = 0.1
LOOK_S = 1.0
"""Seconds between checks that an engine is alive while it loads weights."""
ADAPTER = "actor"
"""Our name for the only adapter."""
ABORTED = "abort"
"""vLLM's finish reason for an aborted request."""
KEEPS_WEIGHTS, DISCARDS_WEIGHTS = 1, 2
"""vLLM's sleep levels: move the weights to host memory, or discard them."""


class VllmSampler:
    """Serves an engine that it owns. All calls are made on one event loop."""

    def __init__(
        self, engine: Any, tokens: Tokens, who: str, *, takes_adapter: bool = False, keeps_cache: bool = False
    ) -> None:
        """`who` names the worker in errors. The engine's weights are version 0.

        With `takes_adapter` only adapters are handed over, so the engine must keep its base weights. With
        `keeps_cache`, unfinished samples keep their KV cache when weights arrive.
        """
        self._engine, self._tokens, self._who = engine, tokens, who
        self._keeps_cache = keeps_cache
        self._level = KEEPS_WEIGHTS if takes_adapter else DISCARDS_WEIGHTS
        self.version = 0
        self._numbers = itertools.count()
        self._adapter: Any = None
        """The adapter of a LoRA actor, once one was loaded."""
        self._in_flight: set[str] = set()
        """Ids of the engine's requests."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        """Set while the engine accepts requests."""
        self._open.set()
        self._asleep = False
        self._without_weights = False
        """True if its weights were discarded and none loaded since."""
        self._loading = asyncio.Lock()
        self._broken = ""
        """Reason why it cannot sample until weights are loaded."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Every completion of every request, as each finishes. A reader that stops early frees the engine."""
        for request in requests:
            self._check(request)
        finished: asyncio.Queue[Completion | RlcoreError] = asyncio.Queue()

        async def work(request: GenerateRequest, sample: int) -> None:
            try:
                with boundary(f"request '{request.id}', sample {sample}", WorkerError):
                    finished.put_nowait(await self._sample(request, sample))
            except RlcoreError as error:
                finished.put_nowait(error)

        # Tasks begin in the order of their creation, so the engine gets the requests in canonical order.
        ordered = sorted(requests, key=lambda request: request.id)
        tasks = [asyncio.create_task(work(request, sample)) for request in ordered for sample in range(request.n)]
        try:
            for _ in tasks:
                result = await finished.get()
                if isinstance(result, RlcoreError):
                    raise result
                yield result
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its response together."""
        return int(self._engine.model_config.max_model_len)

    def _check(self, request: GenerateRequest) -> None:
        num_prompt, budget = len(request.token_ids), request.sampling.max_tokens
        window = self.context_length
        if num_prompt == 0 or budget < 1:
            raise WorkerError(
                f"request '{request.id}' has {num_prompt} prompt tokens and max_tokens={budget}; needs at least 1"
            )
        if num_prompt + budget > window:
            raise ConfigError(
                f"request '{request.id}' has {num_prompt} prompt tokens and max_tokens={budget}, together more than "
                f"the window of {window} tokens; lower rollout.max_tokens or data.max_prompt_tokens, or raise "
                "plugins.vllm.max_model_len"
            )
        self._tokens.check_stop(request.sampling.stop, f"stop strings of request '{request.id}'")

    async def load_weights(self, handle: WeightsHandle) -> int:
        """Load weights; unfinished samples continue with them. WorkerError when they cannot be read.

        After that error the engine refuses to sample, because it is unknown which of its weights are new. A sleeping
        engine gets back only the memory of its weights and stays asleep; `wake` restores the memory of the KV cache.
        """
        async with self._loading:
            self._open.clear()
            try:
                async with self._interrupted():
                    await self._wake_weights()
                    await self._reload(handle)
                    self.version, self._without_weights, self._broken = handle.version, False, ""
            except RlcoreError as error:
                self._broken = str(error)
                raise
            finally:
                if not self._asleep:
                    self._open.set()
            return self.version

    async def sleep(self, release: bool) -> None:
        """Stop sampling until `wake`, which continues unfinished samples. `release` frees the engine's device.

        The KV cache is lost, and so are the weights, which `load_weights` replaces before `wake`. An engine that takes
        adapters keeps its weights in host memory.
        """
        async with self._loading:
            self._asleep = True
            self._open.clear()
            await self._call_off()
            if release:
                self._without_weights |= self._level == DISCARDS_WEIGHTS
                with boundary("the engine's sleep", WorkerError):
                    await self._unless_dead(self._engine.sleep(self._level))

    async def wake(self) -> None:
        """Resume sampling; every sample fails with WorkerError if weights were discarded and none loaded since."""
        async with self._loading:
            with boundary("the engine's waking", WorkerError):
                if self._asleep and await self._engine.is_sleeping():
                    await self._unless_dead(self._engine.wake_up())  # the rest that is asleep
            if self._without_weights:
                self._broken = self._broken or f"{self._who}: its weights were discarded in its sleep, and it got none"
            self._asleep = False
            self._open.set()

    async def _wake_weights(self) -> None:
        """Restore only the memory for the weights of a sleeping engine."""
        with boundary("the engine's waking", WorkerError):
            if self._asleep and await self._engine.is_sleeping():
                await self._unless_dead(self._engine.wake_up(["weights"]))

    @contextlib.asynccontextmanager
    async def _interrupted(self) -> AsyncIterator[None]:
        """Inside, nothing is sampled. Requests are aborted, or kept with their cache and then resumed.

        Kept requests are aborted if the block fails: the version of their next tokens would be unknown.
        """
        if not self._keeps_cache or self._asleep or not self._in_flight:
            await self._call_off()
            yield
            return
        with boundary("the engine's pause", WorkerError):
            await self._unless_dead(self._engine.pause_generation(mode="keep", clear_cache=False))
        try:
            yield
        except BaseException:
            await self._call_off()
            raise
        finally:
            with boundary("the engine's resumption", WorkerError):
                await self._unless_dead(self._engine.resume_generation())

    async def _call_off(self) -> None:
        """Abort the engine's requests; one that the engine does not know yet is aborted when it does."""
        while self._in_flight:
            await self._engine.abort(list(self._in_flight))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._idle.wait()

    async def _reload(self, handle: WeightsHandle) -> None:
        check_readable(handle)
        with boundary(f"version {handle.version} of the weights at '{handle.place}'", WorkerError):
            if handle.kind == "adapter":
                await self._exchange_adapter(handle)
            else:
                await self._unless_dead(self._engine.start_weight_update())
                await self._unless_dead(self._engine.update_weights(WeightTransferUpdateRequest(asdict(handle))))
                await self._unless_dead(self._engine.finish_weight_update(weight_version=label_of(handle.version)))
            # Entries of kept requests cannot be dropped; no later request uses them, because its salt differs.
            if not self._in_flight and not await self._unless_dead(self._engine.reset_prefix_cache()):
                raise WorkerError("vLLM did not empty its prefix cache")

    async def _unless_dead(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of an engine call; WorkerError if the engine dies during it, when vLLM would never return."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                if self._engine.errored:
                    raise WorkerError(f"{self._who}: its engine died during a call")
        finally:
            task.cancel()
        return await task

    async def _exchange_adapter(self, handle: WeightsHandle) -> None:
        """Replace the adapter; requests use the new one from now on."""
        if not await self._unless_dead(self._engine.add_lora(LoRARequest(ADAPTER, 1, handle.path, load_inplace=True))):
            raise WorkerError("vLLM did not load the adapter")
        self._adapter = LoRARequest(ADAPTER, 1, handle.path)  # requests do not load it again
        await self._unless_dead(self._engine.update_weight_version(label_of(handle.version)))

    def _check_version(self, output: Any, version: int) -> None:
        """WorkerError when the engine reports (at the end of a request, from 0.32 on) weights other than this version,
        or, for kept requests, other than a version that has arrived since."""
        found = {span.version for span in getattr(output, "weight_versions", None) or ()} - {label_of(version)}
        if self._keeps_cache:
            found = {label for label in found if not version < version_of(label) <= self.version}
        if found:
            raise WorkerError(
                f"vLLM sampled with the weights {', '.join(sorted(found))} where it should with {label_of(version)}"
            )

    async def health(self) -> str:
        """A description of the served model; raises when the engine is dead."""
        if self._broken:
            raise WorkerError(self._broken)
        with boundary("the engine", WorkerError):
            await self._engine.check_health()
        return f"{self._who}: version {self.version} of the weights"

    def close(self) -> None:
        """End the engine."""
        self._engine.shutdown()

    async def _sample(self, request: GenerateRequest, sample: int) -> Completion:
        """One sample, with one request to the engine per version of the weights that contributes to it."""
        row = _Row(request, sample, self._tokens)
        while row.finish is None:
            while not self._open.is_set():  # it may be closed again before this task resumes
                await self._open.wait()
            if self._broken:
                raise WorkerError(self._broken)
            await self._extend(row)
        return row.completion(time.monotonic() - row.began)

    async def _extend(self, row: "_Row") -> None:
        """Sample until the row ends or its request is aborted."""
        number = f"{row.request.id}#{row.sample}.{next(self._numbers)}"
        version, start = self.version, len(row.token_ids)
        prompt = TokensPrompt(
            prompt_token_ids=[*row.request.token_ids, *row.token_ids], cache_salt=f"version {version}"
        )
        self._in_flight.add(number)
        self._idle.clear()
        try:
            generated = self._engine.generate(prompt, row.settings(), number, lora_request=self._adapter)
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    self._check_version(output.outputs[0], version)
                    if row.finish is None:
                        row.take(output.outputs[0], version)
                    if self._keeps_cache:
                        await self._label(row, output, start, number)
                    elif row.finish is not None:
                        break
        finally:
            self._in_flight.discard(number)
            if not self._in_flight:
                self._idle.set()
        if row.finish is None and self._open.is_set() and len(row.token_ids) == start:
            raise WorkerError("vLLM ended the request without a token and without a reason")

    async def _label(self, row: "_Row", output: Any, start: int, number: str) -> None:
        """Give tokens the versions that the engine reports at the end of a request; aborts the request if the row has
        ended before."""
        if output.finished:
            row.label(start, output.outputs[0].weight_versions or ())
        elif row.finish is not None:
            await self._engine.abort(number)


class _Row(SampledRow):
    """A sample that grows."""

    def __init__(self, request: GenerateRequest, sample: int, tokens: Tokens) -> None:
        super().__init__(request, sample, tokens)
        self.began = time.monotonic()

    def settings(self) -> Any:
        """The engine's sampling settings for the rest of the row.

        With stop strings, the engine returns tokens as they arrive and the row itself finds its end, exactly where the
        embedded rollout finds it.
        """
        sampling = self.request.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens - len(self.token_ids),
            seed=seed_of(self.request.seed, self.sample, len(self.token_ids)),
            stop_token_ids=sorted(self.eos_ids),
            ignore_eos=True,  # vLLM would choose them itself
            logprobs=0,  # only the sampled token's
            flat_logprobs=True,  # lists of numbers: an object for each token takes 4 us of the process that answers
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY,
        )

    def label(self, start: int, spans: Sequence[Any]) -> None:
        """Set the versions of the tokens from `start` on, given as vLLM's spans relative to `start`."""
        self.versions = [run for run in self.versions if run[0] < start]
        for span in spans:
            run = (start + span.start, version_of(span.version))
            if run[0] < len(self.token_ids) and (not self.versions or self.versions[-1][1] != run[1]):
                self.versions.append(run)

    def take(self, output: Any, version: int) -> None:
        """Append the tokens sampled since the last call; WorkerError when logits are not finite."""
        ids, found = list(output.token_ids), output.logprobs.logprobs if output.logprobs else []
        if len(ids) != len(found):
            raise WorkerError(f"vLLM gave {len(found)} log-probs of {len(ids)} tokens")
        for token, logprob in zip(ids, found, strict=True):
            self.append(token, logprob, version)
            if self.finish is not None:
                return  # later tokens were sampled before the end was detected
        if output.finish_reason in (None, ABORTED):
            return
        if output.finish_reason != "length":
            raise WorkerError(f"vLLM ended the request for the reason '{output.finish_reason}'")
        self.finish = FinishReason.LENGTH


def label_of(version: int) -> str:
    """The engine's name for a version of the weights; the initial ones have vLLM's own name."""
    return str(version) if version else "default"


def version_of(label: str) -> int:
    """The version of the weights with this engine name; -1 if the name is not ours."""
    if label == "default":
        return 0
    return int(label) if label.isdecimal() else -1


def seed_of(seed: int, sample: int, offset: int) -> int:
    """The seed for a sample's tokens from `offset` on: each sample has its own random stream."""
    digest = hashlib.blake2b(f"{seed} {sample} {offset}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
