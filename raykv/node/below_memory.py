"""Lookups in the tiers below memory."""

import numpy as np
import numpy.typing as npt

from raykv.protocol.reasons import Place
from raykv.tier.mover import TierMover
from raykv.types import KeyArray


def find_below(mover: TierMover, keys: KeyArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Look keys up in the tiers, the fastest first.

    Returns:
        The place (`reasons.Place`) and the length of each chunk; Place.NOWHERE and 0 if no tier holds the chunk.
    """
    places, nbytes = np.full(len(keys), Place.NOWHERE, np.uint8), np.zeros(len(keys), np.uint32)
    for tier in mover.tiers:
        absent = np.flatnonzero(places == Place.NOWHERE)
        held = absent[tier.has(keys[absent])]
        for position, found in zip(held.tolist(), tier.find(keys[held]), strict=True):
            if found is not None:
                places[position], nbytes[position] = tier.place, found.nbytes
    return places, nbytes
