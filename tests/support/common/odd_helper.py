"""A helper process that misbehaves on request: ``python -m odd_helper``."""

import os
import signal
import sys
import time

from quire.protocol.process.helper import Answer, serve

EXTRA_BYTES = 256 * 2**20


def make(hello: bytes) -> tuple[bytes, Answer | None]:
    if hello == b"no":
        return b"will not", None
    return b"", lambda question: answer(question, len(hello))


def answer(question: bytes, length: int) -> bytes:
    word, _, rest = question.partition(b" ")
    match word.decode():
        case "pid":
            return str(os.getpid()).encode()
        case "echo":
            return rest
        case "hello":
            return b"x" * length
        case "print":
            sys.stdout.write("not an answer\n" * 100)
            sys.stdout.flush()
            os.write(1, b"nor this")
            return b"printed"
        case "die":
            os.kill(os.getpid(), int(rest))
        case "exit":
            os._exit(int(rest))
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(1000)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "take":
            return str(_takes(int(rest) * 2**20)).encode()
    raise AssertionError(question)


def _takes(size: int) -> bool:
    try:
        return len(bytearray(b"x") * size) == size
    except MemoryError:
        return False


if __name__ == "__main__":
    serve(make, EXTRA_BYTES)
