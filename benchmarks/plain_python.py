"""What a small piece of plain Python takes beside a load: mostly the wait for a core.

The piece renders a chat template, cuts the text and hashes the parts, without raykv. In a loop it takes less than
0.1 ms. It has little code, so it says little of what a router pays for code and data that are in no cache any more.
"""

import json
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Final

TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
MESSAGES: Final = 32
WORDS: Final = 60
MEAN_PAUSE_S: Final = 0.5
LOOPS: Final = 200


@contextmanager
def beside() -> Iterator[dict[str, Any]]:
    """Do the piece from time to time in another process, until the end of the block.

    Yields a dict that then has `loop_s`, its time in a loop before the block, and `wall_s` and `cpu_s`, those of each.
    """
    found: dict[str, Any] = {}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.plain_python"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
        yield found
        found |= json.loads(process.communicate(timeout=30)[0])
    finally:
        process.kill()
        process.wait()


def main() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template, rng = ImmutableSandboxedEnvironment().from_string(TEMPLATE), random.Random(1)
    words = [f"word{number}" for number in range(100)]
    messages = [{"role": "user", "content": " ".join(rng.choices(words, k=WORDS))} for _ in range(MESSAGES)]

    def piece() -> tuple[float, float]:
        began_s, cpu_s = time.monotonic(), time.thread_time()
        text = template.render(messages=messages)
        parts = [(blake2b(part.encode()).digest(), len(part), part.count(" ")) for part in text.split("<|im_start|>")]
        sorted(parts, key=lambda each: (each[1], each[0]))
        return time.monotonic() - began_s, time.thread_time() - cpu_s

    loop_s = statistics.median(piece()[0] for _ in range(LOOPS))
    print("ready", flush=True)
    pieces = []
    while not select.select([sys.stdin], [], [], rng.expovariate(1 / MEAN_PAUSE_S))[0]:
        pieces.append(piece())
    print(json.dumps({"loop_s": loop_s, "wall_s": [each[0] for each in pieces], "cpu_s": [each[1] for each in pieces]}))


if __name__ == "__main__":
    main()
