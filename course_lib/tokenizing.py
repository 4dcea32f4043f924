"""Text to tokens, written out: BPE merges, and greedy longest match with and without an index.

The engine tokenizes with the ``tokenizers`` package; these are the definitions that lessons read
and exercises are checked against. Source of the merge rule: Sennrich et al. 2016, as GPT-2 uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Merges = Sequence[Sequence[str]]
"""Pairs of neighbours that may become one token, the most urgent first."""


def bpe_steps(merges: Merges, text: str) -> Iterator[tuple[int, list[str]]]:
    """Merge the characters of one word until nothing can be merged; yield (rank, tokens) per merge.

    Of all neighbours that stand in `merges` those of the lowest rank (index) merge, of equal ones
    the leftmost; one merge a step.
    """
    rank = {tuple(pair): r for r, pair in enumerate(merges)}
    tokens = list(text)
    while True:
        pairs = zip(tokens, tokens[1:], strict=False)
        best = min(((rank[p], i) for i, p in enumerate(pairs) if p in rank), default=None)
        if best is None:
            return
        found, i = best
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
        yield found, list(tokens)


def bpe_encode(merges: Merges, text: str) -> list[str]:
    """The tokens of one word, whose characters are the first tokens; [] for an empty one."""
    tokens = list(text)
    for _, tokens in bpe_steps(merges, text):  # noqa: B007 - the last step is the result
        pass
    return tokens


def longest_match_scan(vocab: Sequence[str], text: str) -> list[int]:
    """Token ids of `text`: at every position the longest token that fits, found by a linear scan.

    vocab[id] is the text of token `id`. Of tokens with equal text the smallest id is taken; an
    empty token is never taken. Raises ValueError where no token fits, naming the position.
    """
    ids, at = [], 0
    while at < len(text):
        best, length = -1, 0
        for token, word in enumerate(vocab):
            if len(word) > length and text.startswith(word, at):
                best, length = token, len(word)
        if best < 0:
            raise ValueError(f"no token fits at position {at}: {text[at : at + 10]!r}")
        ids.append(best)
        at += length
    return ids


def longest_match(vocab: Sequence[str], text: str) -> list[int]:
    """As longest_match_scan, with an index: a dict from text to id, built once."""
    index: dict[str, int] = {}
    for token, word in enumerate(vocab):
        index.setdefault(word, token)  # the first of equals
    longest = max(map(len, vocab), default=0)
    ids, at = [], 0
    while at < len(text):
        for length in range(min(longest, len(text) - at), 0, -1):
            found = index.get(text[at : at + length])
            if found is not None:
                break
        else:
            raise ValueError(f"no token fits at position {at}: {text[at : at + 10]!r}")
        ids.append(found)
        at += length
    return ids
