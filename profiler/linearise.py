"""A profile as a chain of blocks: the layers between the cuts that planners choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dapple_tf.profiler.profile import Floats, Profile


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks of layers; block k holds layers ``positions[k]`` to ``positions[k + 1] - 1``.

    Per block: ``parameter_bytes``, and for the profile's batch ``stash_bytes`` (kept for backward) and
    ``working_bytes`` (of the largest layer). Per inner position (before blocks 1, 2 ...): ``crossing_bytes`` for the
    profile's batch, and ``splittable``: whether stages with different replicas can meet there.
    """

    profile: Profile
    positions: tuple[int, ...]
    parameter_bytes: Floats
    stash_bytes: Floats
    working_bytes: Floats
    crossing_bytes: Floats
    splittable: npt.NDArray[np.bool_]

    @property
    def boundary_bytes(self) -> Floats:
        """The bytes that cross the cut before each block and the end: ``crossing_bytes``, with a 0 before and after."""
        return np.concatenate([[0.0], self.crossing_bytes, [0.0]])

    @property
    def batch_size(self) -> int:
        """Samples of the profile's batch."""
        return self.profile.batch_size

    def block_seconds(self, samples: float) -> tuple[Floats, Floats]:
        """Return the forward and backward seconds of each block for ``samples`` samples."""
        starts = self.positions[:-1]
        return (
            np.add.reduceat(self.profile.forward_seconds(samples), starts),
            np.add.reduceat(self.profile.backward_seconds(samples), starts),
        )

    def weights_seconds(self, samples: float) -> Floats:
        """Return the seconds of each block's weight gradients, a part of its backward, for ``samples`` samples."""
        return np.add.reduceat(self.profile.weights_seconds(samples), self.positions[:-1])


def linearise(profile: Profile) -> Chain:
    """Return the chain of a profile; outputs that skip over a cut count in its ``crossing_bytes``.

    Free layers (views, inputs) have no seconds, parameters or stash. Cuts with only free layers between them divide the
    work equally, so only the cut with the least bytes is kept of each such group. Of cuts with equal bytes, the first
    splittable one is kept, or else the first one. If it is not splittable, the splittable cut with the least bytes is
    kept too. Cuts with only free layers before or after them would make a stage without work, and are dropped.
    """
    return cut_chain(profile, _kept_positions(profile))


def without_unsplittable_cuts(chain: Chain) -> Chain:
    """Return the chain without the cuts at which stages of unequal replica counts cannot meet."""
    if chain.splittable.all():
        return chain
    inner = zip(chain.positions[1:-1], chain.splittable.tolist(), strict=True)
    return cut_chain(chain.profile, [position for position, splittable in inner if splittable])


def cut_chain(profile: Profile, inner: Sequence[int]) -> Chain:
    """Return the chain of a profile that is cut at the positions ``inner``, ascending."""
    crossing = profile.crossing_bytes()
    positions = (0, *inner, len(profile.layers))
    starts = positions[:-1]
    return Chain(
        profile=profile,
        positions=positions,
        parameter_bytes=np.add.reduceat(profile.parameter_bytes, starts),
        stash_bytes=np.add.reduceat(profile.stash_bytes, starts),
        working_bytes=np.maximum.reduceat(profile.working_bytes(), starts),
        crossing_bytes=crossing[[p - 1 for p in inner]],
        splittable=np.array([p not in profile.unsplittable for p in inner], dtype=np.bool_),
    )


def _kept_positions(profile: Profile) -> tuple[int, ...]:
    """Return the positions to cut at; see ``linearise``."""
    crossing, unsplittable = profile.crossing_bytes(), set(profile.unsplittable)
    work = np.cumsum([0, *(not free for free in profile.free_layers)])  # number of layers with work before a position
    runs: dict[int, list[int]] = {}
    for position in profile.positions():
        if 0 < work[position] < work[-1]:
            runs.setdefault(int(work[position]), []).append(position)
    kept = []
    for run in runs.values():
        least = min(run, key=lambda p: (crossing[p - 1], p in unsplittable, p))
        kept.append(least)
        splittable = [p for p in run if p not in unsplittable]
        if least in unsplittable and splittable:
            kept.append(min(splittable, key=lambda p: (crossing[p - 1], p)))
    return tuple(sorted(kept))
