"""Copying, and looking facts up in a context, short or long."""

from .items import Item, qa
from .words import ADJ, ALL, ANIMALS, CITIES, COLORS, FOODS, NAMES, OBJECTS, PLACES, digits, pseudo, word

COPY = [
    "Repeat after me: {}",
    "Repeat: {}",
    "Say exactly: {}",
    "Copy this: {}",
    "Echo: {}",
    "Echo this text: {}",
    "Say: {}",
    "Repeat the following text: {}",
    "Write this again: {}",
    "Please repeat: {}",
    "Print: {}",
    "Output exactly: {}",
    "Repeat this text exactly:\n{}",
    "Copy the next line.\n{}",
    "Repeat after me.\n{}",
    'Say "{}"',
]


def copy_words(r):
    """Repeat 1 to 20 words."""
    n = r.choice([1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20])
    t = " ".join(word(r) for _ in range(n))
    return qa(r.choice(COPY).format(t), t)


def copy_digits(r):
    """Repeat digits, groups of digits, dashed ids."""
    k = r.random()
    if k < 0.4:
        t = digits(r, r.randint(2, 8))
    elif k < 0.7:
        t = " ".join(digits(r, r.randint(1, 4)) for _ in range(r.randint(2, 7)))
    else:
        t = "-".join(r.choice([pseudo(r), digits(r, r.randint(1, 4))]) for _ in range(r.randint(2, 4)))
    return qa(r.choice(COPY).format(t), t)


FACTS = [
    "The {n} for {k} is {v}.",
    "The {n} of {k} is {v}.",
    "{k}: {v}",
    "{k} = {v}",
    "{n} for {k}: {v}",
    "| {k} | {v} |",
    "- {k}: {v}",
]

ASK = [
    "What is the {n} for {k}?",
    "What is the {n} of {k}?",
    "Which {n} does {k} have?",
    "Tell me the {n} for {k}.",
    "{k}?",
    "Give me the {n} of {k}.",
    "And the {n} for {k}?",
    "Look up {k}.",
    "Find the {n} for {k}.",
]

NOUNS = ["code", "number", "password", "key", "value", "price", "id", "score"]


def kv_pairs(r, n):
    """`n` different keys and a value for each."""
    pool = r.choice([COLORS, ANIMALS, FOODS, OBJECTS, NAMES, CITIES, ALL, None])
    keys = []
    while len(keys) < n:
        k = pseudo(r) if pool is None else r.choice(pool if n <= len(pool) * 0.7 else ALL)
        if k not in keys:
            keys.append(k)
    kind = r.random()
    val = (
        (lambda: digits(r, 4))
        if kind < 0.6
        else (lambda: digits(r, r.randint(2, 3)))
        if kind < 0.75
        else (lambda: r.choice(ALL))
        if kind < 0.9
        else (lambda: pseudo(r))
    )
    return keys, [val() for _ in keys]


def kv_answer(n, k, v):
    """The sentence that answers a lookup."""
    return f"The {n} for {k} is {v}."


FILL = [
    "The {a} {o} is near the {p}.",
    "A {a} {x} sat by the {o}.",
    "In the {p} there is a {a} {o}.",
    "We saw the {x} and the {y}.",
    "The {x} likes {f}.",
    "It was a {a} day in the {p}.",
    "The {o} and the {q} are {a}.",
    "Nobody moved the {a} {o}.",
    "Every {x} in the {p} is {a}.",
    "{m} put the {o} on the {q}.",
    "{m} bought {f} and {g}.",
]


def filler(r):
    """A sentence that says nothing of use."""
    return r.choice(FILL).format(
        a=r.choice(ADJ),
        o=r.choice(OBJECTS),
        q=r.choice(OBJECTS),
        p=r.choice(PLACES),
        x=r.choice(ANIMALS),
        y=r.choice(ANIMALS),
        f=r.choice(FOODS),
        g=r.choice(FOODS),
        m=r.choice(NAMES),
    )


def kv_context(r, lo, hi, fill):
    """`lo` to `hi` facts among `fill` other sentences: noun, keys, values, text."""
    n = r.randint(lo, hi)
    noun, fact = r.choice(NOUNS), r.choice(FACTS)
    keys, vals = kv_pairs(r, n)
    lines = [fact.format(n=noun, k=k, v=v) for k, v in zip(keys, vals, strict=True)]
    for _ in range(fill):
        lines.insert(r.randint(0, len(lines)), filler(r))
    sep = "\n" if ("." not in fact or r.random() < 0.5) else " "
    return noun, keys, vals, sep.join(lines)


def kv(r, lo, hi, fill, turns):
    """Facts in a context, asked over `turns` turns."""
    noun, keys, vals, text = kv_context(r, lo, hi, fill)
    head = r.choice(["", "", "Read this.\n", "Here is a list.\n", "Context:\n", "Remember these facts.\n", "Notes:\n"])
    msgs, order = [], [r.randrange(len(keys)) for _ in range(turns)]
    where = r.random()
    if where < 0.15:
        msgs.append(dict(role="system", content=head + text))
    elif where < 0.35:
        msgs += [
            dict(role="user", content=(head or "Remember this.\n") + text),
            dict(role="assistant", content="Okay, I will remember that."),
        ]
    for j, i in enumerate(order):
        named = j > 0 or f"The {noun} " in text or f"{noun} for" in text  # the noun of the answer must have been said
        q = r.choice(ASK if named else [x for x in ASK if "{n}" in x]).format(n=noun, k=keys[i])
        if j == 0 and where >= 0.35:
            q = head + text + r.choice(["\n\n", "\n", "\n\nQuestion: "]) + q
        msgs += [dict(role="user", content=q), dict(role="assistant", content=kv_answer(noun, keys[i], vals[i]))]
    return Item(msgs, mix=False)


def kv_short(r):
    """One fact out of 1 to 8."""
    return kv(r, 1, 8, r.choice([0, 0, 0, 1, 3]), 1)


def kv_turns(r):
    """Facts asked over several turns."""
    return kv(r, 3, 10, r.choice([0, 0, 2]), r.randint(2, 6))


def kv_long(r):
    """One fact out of 12 to 50 among filler."""
    return kv(r, 12, 50, r.randint(25, 95), 1)


def kv_long_turns(r):
    """A long context asked over many turns."""
    return kv(r, 12, 50, r.randint(20, 95), r.randint(4, 12))
