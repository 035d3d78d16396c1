"""What a fuzz target is, and mutations of seeds without a fuzzer."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from raykv.errors import RayKVError

MODULES: Final = ("wire", "text", "files", "members")
NUMBERS: Final = [0, *((1 << bits) - low for bits in (7, 8, 15, 16, 31, 32, 63, 64) for low in (0, 1))]
TARGETS: dict[str, "Target"] = {}


@dataclass(frozen=True, slots=True)
class Target:
    """A parser, and what it may do with any bytes.

    Attributes:
        name: Name of the target.
        function: Parses the bytes, and checks what must be true of the result.
        refuses: The documented errors. All other exceptions are bugs.
        seeds: Returns encodings of real objects.
    """

    name: str
    function: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    seeds: Callable[[], Iterable[bytes]]

    def __call__(self, data: bytes) -> bool:
        """Run the parser. Returns whether it accepted the bytes. Raises what is a bug."""
        try:
            self.function(data)
        except self.refuses:
            return False
        return True


def fuzzed(
    seeds: Callable[[], Iterable[bytes]], *refuses: type[Exception]
) -> Callable[[Callable[[bytes], object]], Target]:
    """Make a target of a function. Without `refuses`, it may raise any RayKVError."""

    def made(function: Callable[[bytes], object]) -> Target:
        name = function.__name__
        target = TARGETS[name] = Target(name, function, refuses or (RayKVError,), seeds)
        return target

    return made


def load_targets() -> dict[str, Target]:
    for module in MODULES:
        import_module(f"tests.fuzz.{module}")
    return TARGETS


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Return a seed with a few changes."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b""
            case 2:
                del data[at : at + rng.choice([1, 4, 16, len(data)])]
            case 3:
                data[at:at] = rng.randbytes(rng.choice([1, 2, 8, 64]))
            case 4:
                width = rng.choice([1, 2, 4, 8])
                number = rng.choice(NUMBERS) & (1 << 8 * width) - 1
                data[at : at + width] = number.to_bytes(width, rng.choice(["little", "big"]))
            case 5:
                other = rng.choice(seeds)
                data[at : at + rng.randrange(32)] = other[rng.randrange(len(other) + 1) :][:32]
            case 6:
                data[at:at] = data[at : at + rng.choice([1, 8, 32])] * rng.choice([1, 2, 40])
    return bytes(data[: 1 << 16])
