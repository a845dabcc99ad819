"""Words that decide what a question is about: two questions that differ in one of them are never the same.

A similarity of sentences hardly sees them: "open" and "closed", a negation, another number, another name. What is
guarded is compared in its order, so that "from Porto to Faro" is not "from Faro to Porto".
"""

from __future__ import annotations

import re
import unicodedata

_TOKEN = re.compile(r"\d+(?:[.,:/]\d+)*|[^\W\d_]+(?:['’][^\W\d_]+)*|[^\w\s.,;:!?'’\"()\[\]{}]")
_SUFFIXES = ("ing", "ed", "es", "s", "d")
_SHORTEST_STEM = 3
_NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion half quarter
third once twice double triple single dozen first second last next previous
"""
_POLARITY = """
not no never none neither nor nobody nothing nowhere cannot without except but hardly barely unless open close shut on
off in out up down over under above below before after high low higher lower highest lowest top bottom more less fewer
most least many few much little big small bigger smaller large larger largest smallest long short longer shorter
longest shortest fast slow faster slower fastest slowest early late earlier later earliest latest old new older newer
oldest newest good bad better worse best worst right wrong true false yes left inside outside maximum minimum max min
average mean median total sum count increase decrease rise rose fall fell risen fallen gain gained lose lost win won
grow grew shrink shrank buy bought sell sold hot cold warm cool wet dry full empty start stop begin began end finish
enter exit arrive leave left come came go went accept reject allow forbid deny permit enable disable safe dangerous
alive dead born die present absent present past future same different equal all any some every each both only always
sometimes often rarely ever still yet already again possible impossible must may can could should would will want need
like love hate agree disagree include exclude add remove create delete lock unlock send receive sent received give
take gave took lend borrow pay owe win halted resumed
"""
_UNITS = """
mm cm m km inch inches foot feet yard yards mile miles mg g kg gram grams kilogram kilograms ton tons pound pounds
ounce ounces ml l liter liters litre litres gallon gallons ms s sec second seconds min minute minutes h hour hours day
days week weeks month months year years today tomorrow yesterday now morning noon evening night monday tuesday
wednesday thursday friday saturday sunday january february march april june july august september october november
december celsius fahrenheit kelvin degree degrees percent percentage euro euros dollar dollars cent cents pence usd
eur gbp yen hertz hz watt watts volt volts amp amps bar pascal byte bytes kb mb gb tb kib mib gib bit bits
"""
_ASKED = """
who whom whose when where why how i me my mine you your yours he him his she her hers we us our they them their
"""
_BEGINNINGS = """
what which is are was were am be do does did has have had there tell say name show list give please the a an and at by
for from of to with this that these those
"""
_PLAIN_BEGINNINGS = frozenset(_BEGINNINGS.split())


def _stem(word: str) -> str:
    """A word without the commonest endings: "opened" and "opens" are "open"."""
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= _SHORTEST_STEM:
            return word.removesuffix(suffix).rstrip("e")
    return word.rstrip("e") if len(word) > _SHORTEST_STEM else word


_GUARDED = frozenset(_stem(word) for words in (_NUMBERS, _POLARITY, _UNITS, _ASKED) for word in words.split())
_NEGATING = ("un", "non", "dis", "im", "ir", "il", "in")


def guarded(text: str) -> tuple[str, ...]:
    """The guarded words of a question, in their order, folded so that case and endings make no difference.

    Numbers, number words, signs and units; negations, "n't" and negating prefixes of guarded words included; words that
    have an opposite or compare; pronouns and what asks for a person, a place, a time or an amount; and names, which are
    all words with a capital letter but for common ones that begin a sentence.
    """
    found = []
    is_first = True
    for match in _TOKEN.finditer(unicodedata.normalize("NFKC", text)):
        token = match[0]
        found += _of_token(token, begins=is_first)
        is_first = text_ends(match.string, match.end())
    return tuple(found)


def text_ends(text: str, at: int) -> bool:
    """Whether what stands from there on ends a sentence."""
    return text[at : at + 1] in (".", "!", "?", "\n", ":")


def _of_token(token: str, *, begins: bool) -> list[str]:
    word = token.casefold().replace("’", "'")
    if not word[0].isalpha():
        return [word]
    found = []
    if word.endswith("n't"):
        found.append("not")
        word = word.removesuffix("n't")
        word = {"ca": "can", "wo": "will", "sha": "shall"}.get(word, word)
    word = word.partition("'")[0] if word.partition("'")[2] in ("s", "re", "ve", "ll", "d", "m") else word
    stem = _stem(word)
    if stem in _GUARDED:
        return [*found, stem]
    is_name = token[0].isupper() and not (begins and word in _PLAIN_BEGINNINGS)
    if is_name or any(letter.isupper() for letter in token[1:]):
        return [*found, word]
    if any(word.startswith(prefix) and _stem(word.removeprefix(prefix)) in _GUARDED for prefix in _NEGATING):
        return [*found, stem]
    return found
