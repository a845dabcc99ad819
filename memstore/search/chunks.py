"""Texts longer than an embedder reads, in parts that it reads whole."""

import re
import unicodedata
from collections.abc import Callable

# Of a window: shared with the next one, so that what stands at a cut is whole in one of them.
_OVERLAP = 0.15
# A window is good enough from this part of the limit on; to fill it further costs more counts than it saves windows.
_FILLED = 0.8
_AIM = 0.93
# How much of a window's end is searched for a boundary between sentences, and between words.
_SENTENCE_TAIL = 0.25
_WORD_TAIL = 0.5

_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]+[」』”’]?\s*|\n\s*")
_SPACE = re.compile(r"\s+")
_JOINER = "\u200d"
_CONTINUING = _JOINER + "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"  # and the skin tones


def split_for_embedding(text: str, *, max_tokens: int, count_tokens: Callable[[str], int]) -> list[str]:
    """Return `text` itself where it fits, else windows of it that fit and together hold every character.

    Windows are in order, and neighbours overlap by about 15 %. They are cut behind a sentence where one ends in the
    last quarter, else behind white space, else between characters; a character and its combining marks stay together
    unless they alone do not fit.

    Parameters
    ----------
    max_tokens
        Tokens of a window, special ones included.
    count_tokens
        Length in tokens, special ones included. It is called about twice a window, on texts of a window's size, and
        once on the whole.

    Raises
    ------
    ValueError
        Where one code point is longer than `max_tokens`.
    """
    total = count_tokens(text)
    if total <= max_tokens:
        return [text]
    usual = max(1, int(_AIM * len(text) * max_tokens / total))
    windows: list[str] = []
    start = covered = 0
    while covered < len(text):
        stop = _window_end(text, start, usual, max_tokens=max_tokens, count_tokens=count_tokens)
        if stop > covered:
            windows.append(text[start:stop])
            start, covered = _next_start(text, start, stop), stop
        else:
            # What it shares with the window before is so dense that nothing else fits: go on without that.
            start = covered
    return windows


def _window_end(text: str, start: int, length: int, *, max_tokens: int, count_tokens: Callable[[str], int]) -> int:
    """Return where a window from `start` ends that fits and is filled well; `length`, in characters, is tried first."""
    fits, too_far = start, len(text) + 1
    while too_far - fits > 1:
        if start + length >= too_far > len(text):
            length = len(text) - start
        elif not fits < start + length < too_far:
            length = (fits + too_far) // 2 - start
        end = _cut(text, start, start + length)
        if end <= fits:
            # The next boundary is too far.
            break
        count = max(1, count_tokens(text[start:end]))
        aimed = int(_AIM * (end - start) * max_tokens / count)
        if count > max_tokens:
            too_far, length = end, aimed
            continue
        fits = end
        if end == len(text) or count >= _FILLED * max_tokens:
            break
        # Twice at most: a count that hardly depends on the length says nothing about where the limit is.
        length = min(aimed, 2 * (end - start))
    if fits == start:
        raise ValueError(f"an embedder's limit of {max_tokens} tokens leaves no room for {text[start]!r}")
    return fits


def _next_start(text: str, start: int, stop: int) -> int:
    """Return where the window behind `[start, stop)` starts, inside of it."""
    target = stop - int(_OVERLAP * (stop - start))
    space = _SPACE.search(text, target - 1, stop)
    return space.end() if space and space.end() < stop else _between_characters(text, start, target)


def _cut(text: str, start: int, stop: int) -> int:
    """Return the best place in `(start, stop]` for the end of a window."""
    if stop == len(text):
        return stop
    for boundary, tail in ((_SENTENCE_END, _SENTENCE_TAIL), (_SPACE, _WORD_TAIL)):
        ends = [found.end() for found in boundary.finditer(text, stop - int(tail * (stop - start)), stop)]
        if ends:
            return ends[-1]
    return _between_characters(text, start, stop)


def _between_characters(text: str, start: int, stop: int) -> int:
    """Return the last place in `(start, stop]` that divides no character from its marks, or `stop` if none is."""
    place = stop
    while start < place < len(text) and (_continues(text[place]) or text[place - 1] == _JOINER):
        place -= 1
    return place if place > start else stop


def _continues(character: str) -> bool:
    # Variation selectors are marks as well.
    return character in _CONTINUING or unicodedata.category(character)[0] == "M"
