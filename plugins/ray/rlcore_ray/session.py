"""The connection of a run to Ray: joins a cluster, or starts one on this machine and leaves nothing behind."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlcore import RlcoreError, WorkerError
from rlcore.cluster.kit import WorkerThread, thread_environment
from rlcore.contracts.clusters import ClusterContext, WorkerPlan
from rlcore.errors import boundary, describe
from rlcore_ray.actor import ASIDE, MAX_CALLS, ActorHost
from rlcore_ray.body import LOOPBACK, ActorBody
from rlcore_ray.directories import remove, session_directories
from rlcore_ray.output import ActorOutput
from rlcore_ray.placement import BundleSlot, Placement, bundles_of, slots_of
from rlcore_ray.reaper import VARIABLE, Reaper
from rlcore_ray.settings import RaySettings

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
"""Seconds for Ray to start, or to answer at its address."""
LESS_BUSY = (
    "needs a machine that is less busy; start the run again, or run `ray start --head` and set plugins.ray.address=auto"
)
LEAVE_S = 6.0
"""Seconds for leaving Ray, including a running attempt to connect; then a Ray of ours is killed."""
SLOW_START = "timed out during startup"
"""Part of Ray's error when its servers are not up after the 30 s that Ray waits for them."""
REACH_S = 5.0
"""Seconds for the port at the address to accept a connection."""


class RaySession:
    """A connection with its placement groups, in which actors are launched."""

    def __init__(self, context: ClusterContext) -> None:
        self._context = context
        self._settings = context.settings(RaySettings)
        self._slots = slots_of(context)
        self._placement = Placement(context.run_dir.name, context.pools)
        self._thread: WorkerThread | None = None
        """The thread that connects and leaves; None if Ray was already connected."""
        self._reaper: Reaper | None = None
        self._directories_before: frozenset[Path] = frozenset()
        """Directories that Rays of this process had before it started ours."""
        self._output = ActorOutput()
        self._devices: dict[tuple[str, int], str] = {}
        """The device at each spot of a pool, where a bundle has several."""
        self._environment: dict[str, str] = {}
        """Environment of the actors of a Ray that we started: their ranks meet on this machine."""

    async def open(self) -> None:
        """Connect, and reserve the pools."""
        settings = self._settings
        if ray.is_initialized():
            _refuse_settings(settings)
            self._output.join()
        else:
            # Processes that Ray starts here end with the thread that started them, so keep that thread.
            self._thread = WorkerThread("ray").start()
            with _own_signals():
                await self._connect_in_time(self._thread)
        await self._placement.place(bundles_of(self._slots, self._context.pools), settings.placement_s)

    async def _connect_in_time(self, thread: WorkerThread) -> None:
        try:
            await thread.run(self._connect, "cluster: connecting to Ray", CONNECT_S)
        except WorkerError as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            way_out = "`ray status` there tells more" if self._settings.address else LESS_BUSY
            raise WorkerError(f"{self._place}: it took longer than {CONNECT_S:g} s; {way_out}") from error

    @property
    def _place(self) -> str:
        """The Ray to connect to, in errors."""
        address = self._settings.address
        return f"plugins.ray.address={address}" if address else "cluster: starting Ray on this machine"

    def _connect(self) -> None:
        settings = self._settings
        # Without it Ray hides the devices from actors that request none, and warns that it will stop doing so.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": True}
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            if settings.address:
                _check_reachable(settings.address)
                # Ray sends its token automatically only to a cluster that it finds automatically.
                maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
                with self._output.beginning():
                    ray.init(settings.address, **quiet)
                return
            pools = bundles_of(self._slots, self._context.pools).values()
            num_cpus = sum(bundle["CPU"] for pool in pools for bundle in pool)
            mark = uuid.uuid4().hex
            self._directories_before = session_directories()
            self._reaper = Reaper(mark)
            os.environ[VARIABLE] = mark
            make_private_token()
            with _loopback_only(), _own_sessions(), self._output.beginning():
                ray.init(
                    "local",
                    _node_ip_address=LOOPBACK,
                    num_cpus=max(self._context.cpus, ceil(num_cpus)),
                    num_gpus=self._context.gpus,
                    object_store_memory=int(settings.object_store_gib * 2**30) or None,
                    include_dashboard=settings.dashboard,
                    **quiet,
                )
            self._environment["GLOO_SOCKET_IFNAME"] = "lo"
        except RlcoreError:
            raise
        except Exception as error:  # Ray raises a plain one if its servers do not answer in time
            raise WorkerError(f"{self._place}: {_why(error)}") from error
        finally:
            os.environ.pop(VARIABLE, None)

    def device_of(self, worker: WorkerPlan) -> str:
        """`WorkerContext.device` for each of its ranks."""
        return "cuda:0" if self._context.host_of(worker).request.gpus else "cpu"

    async def launch(self, worker: WorkerPlan, index: int) -> ActorBody:
        """The actors of a replica, still empty."""
        request = worker.request
        slots = self._slots[request.role.name][index * request.ranks : (index + 1) * request.ranks]
        for pool in sorted({slot.pool for slot in slots}):
            await self._placement.stand(pool, self._settings.placement_s)
        path = [str(Path(entry).absolute()) for entry in sys.path]
        actors = []
        for slot in slots:
            strategy = PlacementGroupSchedulingStrategy(
                self._placement.group(slot.pool), placement_group_bundle_index=slot.bundle
            )
            actor = ray.remote(concurrency_groups={ASIDE: MAX_CALLS})(ActorHost).options(
                num_cpus=slot.cpus,
                num_gpus=slot.gpus,
                max_restarts=0,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=strategy,
                # Unless set, Ray derives these from the actor's CPUs; the plan's number takes precedence.
                runtime_env={"env_vars": thread_environment(self._context.threads_of(worker)) | self._environment},
            )
            actors.append(actor.remote(path, str(Path.cwd())))
        body = ActorBody(f"{request.role.name}[{index}]", actors, self._output)
        running = False
        try:
            await body.meet(self._context.deadlines.setup_s)
            with boundary(f"{body.name}: its devices", WorkerError):
                await asyncio.gather(*map(self._share_devices, slots, actors))
            running = True
        finally:
            if not running:
                body.kill()
        return body

    async def _share_devices(self, slot: BundleSlot, actor: Any) -> None:
        """Remember the devices of an actor in a bundle of several, or give it those that it borrows."""
        if slot.borrows:
            await actor.use_devices.remote([self._devices[slot.pool, spot] for spot in slot.spots])
        elif slot.spots:
            spots = [(slot.pool, spot) for spot in slot.spots]
            self._devices.update(zip(spots, await actor.devices.remote(), strict=True))

    def call_off_abort(self) -> None:
        """Cancel what Ray's signal handler has scheduled: it aborts the process three seconds later."""
        _call_off_abort()

    async def close(self) -> None:
        """Release the pools and leave Ray once no actor is left. A Ray that we started ends."""
        self._output.close()
        if self._thread is None:
            self._placement.close()
            return
        try:
            # An abandoned attempt to connect still runs in that thread; this queues behind it.
            await self._thread.run(self._leave, "cluster: leaving Ray", LEAVE_S)
        except WorkerError as error:
            logger.warning("%s", error)
        finally:
            if self._reaper is not None:
                await asyncio.to_thread(self._reaper.dismiss)
                for directory in session_directories() - self._directories_before:
                    await asyncio.to_thread(remove, directory)
            await self._thread.stop(self._context.deadlines.close_s)

    def _leave(self) -> None:
        with boundary("cluster: leaving Ray", WorkerError):
            try:
                self._placement.close()
            finally:
                ray.shutdown()


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Makes a Ray that is started inside listen on the loopback interface only.

    When asked for 127.0.0.1, Ray uses this machine's outer address and listens on all interfaces, unless multi-node
    clusters are disabled. Ray's processes read that from the environment.
    """
    name, before, constant = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, dict(os.environ), "ENABLE_RAY_CLUSTER"
    may_have_others = getattr(ray_constants, constant)
    os.environ[name] = "0"
    setattr(ray_constants, constant, False)
    try:
        yield
    finally:
        setattr(ray_constants, constant, may_have_others)
        del os.environ[name]
        if name in before:
            os.environ[name] = before[name]


@contextlib.contextmanager
def _own_sessions() -> Iterator[None]:
    """Makes the servers that Ray starts inside leaders of sessions, which actors inherit.

    A SIGTERM for our process group, as `timeout` sends it, or the SIGHUP of a closed terminal would end them before the
    run has saved.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process's signal handlers, which Ray would replace.

    A process that connects gets a handler from Ray, below Python's. It prints a trace, calls the previous handler and
    aborts the process three seconds later, for example during a checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    finally:
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:  # else it was not set by Python
            signal.signal(signal.SIGTERM, handler)
            signal.siginterrupt(signal.SIGTERM, False)  # like asyncio
        _call_off_abort()


def _call_off_abort() -> None:
    """Cancel the abort's alarm, set by a signal that arrived while Ray's handler was installed."""
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:  # in Python's view: it is not used here
        signal.alarm(0)


OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private_token() -> None:
    """Create the token file, which Ray would make world-readable, or make an existing one private.

    Its directory becomes unwritable to others. WorkerError naming an existing path that contains no token.
    """
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if has_token or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    path = Path.home() / ".ray" / "auth_token"
    with boundary(f"cluster: Ray's token '{path}'", WorkerError, OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(path.parent.stat().st_mode)
        if mode & OTHERS_WRITE:  # PermissionError if the directory is another user's
            path.parent.chmod(mode & ~OTHERS_WRITE)
        if not os.path.lexists(path):
            _write_token(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or not found.st_size:
                raise WorkerError(f"cluster: '{path}' holds no token for Ray; needs a file with one; remove it")
            if found.st_uid == os.getuid():
                os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)


def _write_token(path: Path) -> None:
    """Create the file atomically; of concurrent writers, the first one wins."""
    descriptor, name = tempfile.mkstemp(prefix=".auth_token.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(generate_new_authentication_token())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _refuse_settings(settings: RaySettings) -> None:
    """WorkerError for a setting that cannot apply to a Ray already running in this process."""
    for name in ("address", "object_store_gib", "dashboard"):
        if value := getattr(settings, name):
            raise WorkerError(
                f"plugins.ray.{name}={value}: Ray is already initialised in this process, and is used as it is; leave "
                "the setting out, or call ray.shutdown() first"
            )


def _check_reachable(address: str) -> None:
    """WorkerError when nothing listens there; Ray itself would retry for minutes."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as cause:
        raise WorkerError(
            f"plugins.ray.address={address}: nothing answers there ({cause}); needs the address of a Ray head, as "
            "`ray start --head` prints it, or 'auto', or none to start Ray on this machine"
        ) from cause


def _why(error: BaseException) -> str:
    """The problem and its remedy. The actual reason is at the end of the chain of causes."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any("AuthToken" in str(error) or "Unauthenticated" in str(error) for error in chain):
        return (
            "the cluster refuses the token, or there is none; needs the token of its head, as RAY_AUTH_TOKEN or in "
            "~/.ray/auth_token"
        )
    if any(SLOW_START in str(error) for error in chain):
        return f"its servers did not answer in the time that Ray allows; {LESS_BUSY}"
    return f"{describe(error)}; `ray status` there tells more"
