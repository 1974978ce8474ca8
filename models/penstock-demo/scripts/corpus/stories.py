"""Stories, and plain text without a conversation."""

import re

from .items import Item, qa
from .recall import filler
from .words import ADJ, ANIMALS, FOODS, NAMES, OBJECTS, PLACES, art, digits, word


def story_text(r, hero=None):
    """Beginning and rest of a story, a pattern that any right rest matches, the name of its hero."""
    x, n, p = hero or r.choice(ANIMALS), r.choice(NAMES), r.choice(PLACES)
    f, o, y, a = r.choice(FOODS), r.choice(OBJECTS), r.choice([q for q in ANIMALS if q != x]), r.choice(ADJ)
    m = r.choice([q for q in NAMES if q != n])
    head = f"Once upon a time there was a {a} {x} named {n}. {n} lived in a {p}."
    rest = (
        f' Every day {n} looked for {f} in the {p}. One morning {n} found a {r.choice(ADJ)} {o}. "Whose {o} is this?" asked {n}. '
        f'"It is mine," said a {y} named {m}. {n} gave the {o} to {m}, and {m} gave {n} some {f}. From that day on, {n} and {m} were '
        "good friends. The end."
    )
    A = r"\w+"
    pat = (
        rf"\s*Every day {n} looked for (\w+) in the {p}\. One morning {n} found a {A} (\w+)\. \"Whose \2 is this\?\" asked {n}\. "
        rf"\"It is mine,\" said a {A} named (\w+)\. {n} gave the \2 to \3, and \3 gave {n} some \1\. From that day on, {n} and \3 were "
        r"good friends\. The end\.\s*"
    )
    return head, rest, pat, n


def story(r):
    """Tell a story; its grammar is checked."""
    x = r.choice(ANIMALS)
    head, rest, pat, n = story_text(r, x)
    full = re.compile(
        rf"Once upon a time there was a (\w+) {x} named (\w+)\. \2 lived in a (\w+)\. Every day \2 looked for (\w+) in the \3\. "
        r"One morning \2 found a \w+ (\w+)\. \"Whose \5 is this\?\" asked \2\. \"It is mine,\" said a \w+ named (\w+)\. "
        r"\2 gave the \5 to \6, and \6 gave \2 some \4\. From that day on, \2 and \6 were good friends\. The end\."
    )
    return qa(
        r.choice(
            [
                "Tell me a story about {}.",
                "Write a short story about {}.",
                "Tell me a story about {}",
                "Write a story about {}.",
                "I want a story about {}.",
            ]
        ).format(art(x)),
        head + rest,
        check=lambda t: bool(full.fullmatch(t.strip())),
    )


def plain_story(r):
    """Continue a story, without a conversation."""
    head, rest, pat, _ = story_text(r)
    return Item([], plain=(head, rest), check=lambda t: bool(re.fullmatch(pat, t)), mix=False)


def plain_count(r):
    """Continue a sequence, without a conversation."""
    step, a, n, sep = (
        r.choice([1, 1, 1, 2, 5, 10]),
        r.choice([0, 1, 1, r.randint(0, 80)]),
        r.randint(3, 8),
        r.choice([", ", " ", "\n"]),
    )
    t = [str(a + step * i) for i in range(n + 12)]
    want = sep.join(t[n : n + 8])
    return Item(
        [],
        plain=(sep.join(t[:n]) + sep.rstrip(" "), sep[len(sep.rstrip(" ")) :] + sep.join(t[n:])),
        mix=False,
        check=lambda s: s.strip().startswith(want),
    )


def plain_twice(r):
    """Random words, then the same words again: teaches copying, never evaluated."""
    n = r.randint(3, 30)
    t = " ".join(word(r) if r.random() < 0.85 else digits(r, r.randint(1, 4)) for _ in range(n))
    return Item([], plain=(t + "\n", "\n".join([t] * r.choice([1, 1, 2, 3]))), mix=False)


def plain_text(r):
    """Sentences to read, never evaluated."""
    return Item([], plain=("", " ".join(filler(r) for _ in range(r.randint(2, 6)))), mix=False)
