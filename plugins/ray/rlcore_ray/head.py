"""Watches the head of a joined Ray: when its server GCS has not answered for a minute, Ray ends this process."""

import asyncio
import logging
import math
import os
import signal
import time

import ray
from ray._private.worker import global_worker
from ray.exceptions import RayError

logger = logging.getLogger(__name__)

ASK_S = 2.0
"""Seconds between two questions, and for an answer."""
RAYS_LIMIT_S = 60.0
"""Seconds after which Ray ends a process whose head does not answer, unless the variable LIMIT says otherwise."""
LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
PATIENCE_FRAC = 0.25
"""Share of that limit after which the run ends, so that it can save before."""


class HeadWatch:
    """Asks the head until it is stopped. A head that stays silent ends the run as a signal does."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self._watch(), name="watching the head of Ray")

    def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        patience_s = PATIENCE_FRAC * float(os.environ.get(LIMIT) or RAYS_LIMIT_S)
        answered_at, is_warned = math.inf, False  # one that has never answered cannot be asked in this way
        while True:
            await asyncio.sleep(ASK_S)
            silent_s = time.monotonic() - answered_at
            if await asyncio.to_thread(_answers):
                answered_at, is_warned = time.monotonic(), False
            elif silent_s > 0 and not is_warned:
                is_warned = True
                logger.warning("cluster: the head of Ray (GCS) does not answer; after %.0f s the run ends", patience_s)
            elif silent_s > patience_s:
                logger.error("cluster: the head of Ray (GCS) has not answered for %.0f s; the run ends", silent_s)
                # Only the handler of a run saves; without one the signal would end the process as Ray does.
                if callable(signal.getsignal(signal.SIGTERM)):
                    os.kill(os.getpid(), signal.SIGTERM)
                return


def _answers() -> bool:
    try:
        global_worker.gcs_client.internal_kv_keys(b"rlcore", None, ASK_S)
    except (RayError, OSError, RuntimeError, AttributeError):  # AttributeError: Ray was left meanwhile
        return not ray.is_initialized()
    return True
