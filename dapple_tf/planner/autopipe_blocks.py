"""AutoPipe's sub-layer granularity: the blocks between residual additions (AutoPipe, section III.B and Fig. 3)."""

from __future__ import annotations

from profiler.linearise import Chain, cut_chain


def sub_layer_blocks(chain: Chain) -> Chain:
    """Return the chain cut only where no residual block is cut.

    The input of a residual block crosses each cut inside it, beside what the block has made of it so far. So cuts are
    inside one where more bytes cross than at the nearest cuts around them, before and behind, with equal bytes: those
    of the stream. In a transformer the blocks that are left are ResidualAttentionBlocks and ResidualFFNBlocks, and what
    stages send is what they would send between whole layers. A profile without such streams keeps all its cuts.
    """
    crossing = chain.crossing_bytes.tolist()
    inside = [False] * len(crossing)
    before: list[int] = []  # cuts before this one, with rising bytes, that no cut with fewer bytes hides
    for index, sent in enumerate(crossing):
        while before and crossing[before[-1]] > sent:
            before.pop()
        if before and crossing[before[-1]] == sent:
            start = before.pop()
            inside[start + 1 : index] = [True] * (index - start - 1)
        before.append(index)
    inner = zip(chain.positions[1:-1], inside, strict=True)
    return cut_chain(chain.profile, [position for position, hidden in inner if not hidden])
