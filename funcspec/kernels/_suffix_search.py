"""Where tokens stand in the text that suffix decoding searches, and what follows them, in Triton.

All text lies in one space of places: first those of the rows, L a row, then those of the corpus, M a line. Source 0 is the part of a
row itself; source 1 is everything else that may be looked at.
"""

from funcspec.kernels._triton import jit, tl


@jit
def locate(place, space):
    """The address of a place, its row (-1 in the corpus), and its column."""
    tokens_ptr, _, corpus_ptr, tokens_stride, corpus_stride, length, width, row_places = space
    in_rows = place < row_places
    inner = tl.where(in_rows, place, place - row_places)
    columns = tl.where(in_rows, length, width)
    line = inner // columns
    column = inner - line * columns
    of_rows = tokens_ptr + line.to(tl.int64) * tokens_stride + column
    of_corpus = corpus_ptr + line.to(tl.int64) * corpus_stride + column
    return tl.where(in_rows, of_rows, of_corpus), tl.where(in_rows, line, -1), column


@jit
def followers(place, space, query, witness, drafted):
    """Where the query's tokens stand with the draft behind them (1 or 0), and the token behind that, -1 if there is none.

    Args:
        place: where the last of the query's tokens would stand.
        space: arguments of the kernel that describe the text.
        query: the row to leave out, address of the newest token, how many tokens from there backwards, and the end of the source.
        witness: address of a place where they stand so; the draft is read behind it.
        drafted: tokens of the draft.
    """
    left_out, newest, size, end = query
    at, line, column = locate(place, space)
    filled = tl.load(space[1] + line, mask=(line >= 0) & (place < end), other=0)
    filled = tl.where(line >= 0, filled, space[6])
    found = (place < end) & (column < filled) & (line != left_out)
    for back in range(0, size):
        found = found & (column >= back)
        found = found & (tl.load(at - back, mask=found, other=-1) == tl.load(newest - back))
    for ahead in range(1, drafted + 1):
        found = found & (column + ahead < filled)
        found = found & (tl.load(at + ahead, mask=found, other=-1) == tl.load(witness + ahead))
    follower = tl.load(at + drafted + 1, mask=found & (column + drafted + 1 < filled), other=-1)
    return found.to(tl.int32), follower


@jit
def most_frequent(first, needed, space, query, witness, drafted, TILE: tl.constexpr, BINS: tl.constexpr):
    """The largest count, if not below `needed`, of a token behind the draft; a place where the lowest such token stands so, or -1.

    Bins are counted first. What a bin holds bounds what its tokens have, so that hardly any token has to be counted by itself.
    """
    end = query[3]
    lane = tl.arange(0, TILE)
    bins = tl.zeros([BINS], dtype=tl.int32)
    token = tl.full((), 2147483647, tl.int32)
    for start in range(first, end, TILE):
        _, follower = followers(start + lane, space, query, witness, drafted)
        bins += tl.histogram(follower & (BINS - 1), BINS, mask=follower >= 0)
        token = tl.minimum(token, tl.min(tl.where(follower >= 0, follower, 2147483647), axis=0))
    most = needed - 1
    reached = tl.full((), -1, tl.int32)
    last = tl.where(tl.max(bins, axis=0) > most, end, first)
    while last > first:
        # Count a token, and find the next higher one whose bin holds more than the best has: ties go to the lowest id.
        count = tl.full((), 0, tl.int32)
        place = tl.full((), -1, tl.int32)
        higher = tl.full((), 2147483647, tl.int32)
        for start in range(first, last, TILE):
            _, follower = followers(start + lane, space, query, witness, drafted)
            same = follower == token
            count += tl.sum(same.to(tl.int32), axis=0)
            place = tl.maximum(place, tl.max(tl.where(same, start + lane, -1), axis=0))
            promising = (follower > token) & (tl.gather(bins, follower & (BINS - 1), 0) > most)
            higher = tl.minimum(higher, tl.min(tl.where(promising, follower, 2147483647), axis=0))
        reached = tl.where(count > most, place, reached)
        most = tl.maximum(most, count)
        bins -= tl.where(tl.arange(0, BINS) == (token & (BINS - 1)), count, 0)
        token = higher
        last = tl.where((token < 2147483647) & (tl.max(bins, axis=0) > most), end, first)
    return most, reached
