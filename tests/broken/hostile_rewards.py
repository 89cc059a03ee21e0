"""Reward functions that do what none should. Each is asked for scores in one run (`test_hostile_rewards`)."""

import contextlib
import itertools
import json
import locale
import os
import pickle
import resource
import signal
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy


def half(completions):
    return [0.5] * len(completions)


def usr1_parent(completions, **columns):
    os.kill(os.getppid(), signal.SIGUSR1)
    return half(completions)


def pipe_parent(completions, **columns):
    os.kill(os.getppid(), signal.SIGPIPE)
    return half(completions)


def winch_parent(completions, **columns):
    os.kill(os.getppid(), signal.SIGWINCH)
    os.kill(os.getppid(), signal.SIGCHLD)
    os.kill(os.getppid(), signal.SIGURG)
    return half(completions)


def chdir(completions, **columns):
    os.chdir("/")
    os.environ.clear()
    os.umask(0o777)
    return half(completions)


def stdout_none(completions, **columns):
    sys.stdout = None
    sys.stderr = None
    sys.__stdout__ = None
    return half(completions)


def setlocale(completions, **columns):
    locale.setlocale(locale.LC_ALL, "C")
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(50)
    return half(completions)


def rlim(completions, **columns):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
    return half(completions)


def rlimfd(completions, **columns):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return half(completions)


def ignore(completions, **columns):
    for s in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(s, signal.SIG_IGN)
    return half(completions)


def thread(completions, **columns):
    threading.Thread(target=time.sleep, args=(100,)).start()
    return half(completions)


def numpy_(completions, **columns):
    return numpy.full(len(completions), 0.5, dtype="float16")


def numpy_obj(completions, **columns):
    return numpy.array([0.5] * len(completions), dtype=object)


def numpy_c(completions, **columns):
    return numpy.array([0.5j] * len(completions))


def decimal_(completions, **columns):
    return [Decimal("0.5")] * len(completions)


def decimal_snan(completions, **columns):
    return [Decimal("sNaN")] * len(completions)


def fraction(completions, **columns):
    return [Fraction(10**400, 3)] * len(completions)


def hugeint(completions, **columns):
    return [10**5000] * len(completions)


def gen(completions, **columns):
    return (0.5 for _ in completions)


def inf_gen(completions, **columns):
    return itertools.repeat(0.5)


class B(float):
    def __float__(self):
        raise SystemExit(0)

    def __reduce__(self):
        return (os._exit, (0,))

    def __repr__(self):
        return "\x1b[2J[bold]"


def subclass(completions, **columns):
    return [B(0.5)] * len(completions)


class L(list):
    def __len__(self):
        return 10**18

    def __iter__(self):
        raise KeyboardInterrupt


def lists(completions, **columns):
    return L([0.5] * len(completions))


class D(dict):
    def __getitem__(self, k):
        raise BaseException("x")


def dicts(completions, **columns):
    return D(score=1)


def raise_base(completions, **columns):
    raise BaseException("[/bold]\x1b]0;x\x07")


def raise_exit(completions, **columns):
    sys.exit(0)


def raise_gen(completions, **columns):
    raise GeneratorExit


def raise_group(completions, **columns):
    raise BaseExceptionGroup("x", [KeyboardInterrupt(), SystemExit(0)])


class Evil(Exception):
    def __str__(self):
        raise RuntimeError("no")

    def __reduce__(self):
        return (os._exit, (0,))


def raise_evil(completions, **columns):
    raise Evil()


class Evil2(Exception):
    def __str__(self):
        return "\ud800" * 3 + "[red]"

    __repr__ = __str__


def raise_surrogate(completions, **columns):
    raise Evil2()


def deep_error(completions, **columns):
    e = ValueError("x")
    for _ in range(5000):
        n = ValueError("y")
        n.__cause__ = e
        e = n
    raise e


def recursion(completions, **columns):
    return recursion(completions)


def forkreturn(completions, **columns):
    os.fork()
    return half(completions)


def setattr_mod(completions, **columns):
    json.dumps = None
    pickle.loads = None
    pickle.dumps = None
    return half(completions)


def excepthook(completions, **columns):
    sys.excepthook = lambda *a: os._exit(0)
    sys.modules.clear()
    return half(completions)


def boolean(completions, **columns):
    return [True] * len(completions)


def strs(completions, **columns):
    return ["0.5"] * len(completions)


def nested(completions, **columns):
    return [[0.5]] * len(completions)


def toomany(completions, **columns):
    return [0.5] * (len(completions) * 1000)


def bytes_(completions, **columns):
    return b"\x01" * len(completions)


def sets(completions, **columns):
    return {0.5}


def nums_tiny(completions, **columns):
    return [5e-324] * len(completions)


def nums_max(completions, **columns):
    return [3.5e38] * len(completions)


def none(completions, **columns):
    return None


def nones(completions, **columns):
    return [None] * len(completions)
