"""Reads recorded sessions of agents, in the format of kv-cache-tester: one JSON file for each session.

A file has `requests`, in order of time `t`, and each has `hash_ids`: one number for each block of its prompt. Equal
numbers in one file mean equal blocks. The requests of a sub-agent are nested, and share the numbers of their file.
There are no texts, so the tokens of a block are chosen at random, but always alike for the same number.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raykv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request.

    Attributes:
        session, turn: Number of the file, in order of names, and of the request in this file.
        at_s: Time since the session's first request.
        prompt: The tokens.
    """

    session: int
    turn: int
    at_s: float
    prompt: list[int]


def read(folder: Path, *, seed: int, block_tokens: int, max_tokens: int, vocabulary: range) -> list[Recorded]:
    """Read all files of a folder, and return their requests as if all sessions had begun at the same time.

    Args:
        folder: The folder. Its files have names that end with .json.
        seed: Chooses the tokens.
        block_tokens: Tokens that stand for a block. Fewer than in the recording make all prompts shorter alike.
        max_tokens: Longer prompts are left out, as a server would refuse them.
        vocabulary: The tokens.

    Raises:
        ConfigError: A file is not a recorded session, or no request is short enough.
    """
    found = []
    for number, path in enumerate(sorted(folder.glob("*.json"))):
        try:
            requests = sorted(_flat(json.loads(path.read_text())["requests"]), key=lambda each: float(each["t"]))
            prompts = [(float(each["t"]), [int(block) for block in each["hash_ids"]]) for each in requests]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not a recorded session of kv-cache-tester: {error!r}") from None
        kept = [(at_s, blocks) for at_s, blocks in prompts if 0 < len(blocks) * block_tokens <= max_tokens]
        for turn, (at_s, blocks) in enumerate(kept):
            prompt = [token for block in blocks for token in _tokens(seed, number, block, block_tokens, vocabulary)]
            found.append(Recorded(number, turn, at_s - kept[0][0], prompt))
    if not found:
        raise ConfigError(f"{folder}: no *.json has a request of at most {max_tokens} tokens; lower the block's tokens")
    return sorted(found, key=lambda each: (each.at_s, each.session, each.turn))


def _flat(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for each in requests:
        if "requests" in each:
            yield from _flat(each["requests"])
        else:
            yield each


def _tokens(seed: int, session: int, block: int, count: int, vocabulary: range) -> list[int]:
    return random.Random(f"{seed} {session} {block}").choices(vocabulary, k=count)
