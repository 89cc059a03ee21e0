"""The process in which chat templates run: `python -m rlcore.contracts.template_child MEMORY CPU_S`.

A template is a program from a model's directory. Here it has limits of memory and processor time, and no secrets in its
environment. transformers renders it, so the text is the same as with transformers.
"""

import pickle
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import IO, Any

from rlcore.errors import ANSWERED, describe

FRAME = struct.Struct(">Q")
"""The length in bytes of the message that follows."""
TEXT, REFUSED, TOO_LARGE = b"t", b"r", b"m"
"""The first byte of an answer: the text, the template's exception, or out of memory."""


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the pipe."""
    head = pipe.read(FRAME.size)
    return pipe.read(FRAME.unpack(head)[0]) if len(head) == FRAME.size else None


def write_frame(pipe: IO[bytes], message: bytes) -> None:
    """Send one message."""
    pipe.write(FRAME.pack(len(message)) + message)
    pipe.flush()


def main(memory: int, cpu_s: float) -> None:
    """Answer requests until standard input ends. The kernel ends the process when a request takes over `cpu_s`."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:] = pickle.loads(read_frame(requests) or pickle.dumps(sys.path))
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    class Shell:
        """The part of a tokenizer that rendering needs."""

        get_chat_template = PreTrainedTokenizerBase.get_chat_template

        def __init__(self, chat_template: Any, special_tokens_map: Mapping[str, Any]) -> None:
            self.chat_template, self.special_tokens_map = chat_template, special_tokens_map

    _limit_memory(memory)
    write_frame(answers, TEXT)
    while (request := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # stands still while the process is idle
        try:
            chat_template, specials, arguments = pickle.loads(request)
            render: Any = PreTrainedTokenizerBase.apply_chat_template
            text = render(Shell(chat_template, specials), tokenize=False, **arguments)
            answer = TEXT + str(text).encode("utf-8", "surrogatepass")
        except MemoryError:
            answer = TOO_LARGE
        except ANSWERED as error:
            answer = REFUSED + describe(error).encode("utf-8", "surrogatepass")
        write_frame(answers, answer)


def _limit_memory(memory: int) -> None:
    """Bound the address space to `memory` bytes beyond what is mapped now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
