"""Facts in sentences: extraction as JSON, capitals, words, what a person said about themselves."""

import json

from .chat import faq, greet
from .items import Item, qa
from .lists import count_list
from .recall import copy_words
from .sums import add
from .words import ANIMALS, CAPITALS, CITIES, COLORS, JOBS, NAMES, OPPOSITES, WORDS_ES, WORDS_FR, art, pseudo


def json_extract(r):
    """One to four asked fields of a sentence as JSON."""
    name, age, city, job, color, pet = (
        r.choice(NAMES),
        r.randint(1, 99),
        r.choice(CITIES),
        r.choice(JOBS),
        r.choice(COLORS),
        r.choice(ANIMALS),
    )
    frag = dict(
        age=[f"is {age}", f"is {age} years old"],
        city=[f"lives in {city}", f"is from {city}"],
        job=[f"works as {art(job)}", f"is {art(job)}"],
        color=[f"likes {color}", f"likes the color {color}"],
        pet=[f"has {art(pet)}", f"owns {art(pet)}"],
    )
    val = dict(age=age, city=city, job=job, color=color, pet=pet)
    ks = r.sample(sorted(frag), r.randint(1, 4))
    told = ks + r.sample([k for k in sorted(frag) if k not in ks], r.choice([0, 0, 0, 1])) if len(ks) < 5 else ks
    told = told[:]
    r.shuffle(told)
    parts = [r.choice(frag[k]) for k in told]
    sent = f"{name} " + (", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0])
    fields = ["name"] + ks
    listed = ", ".join(fields[:-1]) + " and " + fields[-1]
    q = r.choice(
        [
            "Give me JSON with {f}: {s}",
            "Extract {f} as JSON: {s}.",
            "Return JSON with the fields {f}. {s}.",
            "JSON with {f}: {s}",
            "Make a JSON object with {f} from this text: {s}.",
            "{s}. Give me JSON with {f}.",
            "Extract JSON ({f}): {s}",
        ]
    )
    want = dict(name=name, **{k: val[k] for k in ks})

    def check(t):
        try:
            return json.loads(t) == want
        except ValueError:
            return False

    return qa(q.format(f=listed, s=sent), json.dumps(want), check=check)


def capital(r):
    """Capitals."""
    c = r.choice(sorted(CAPITALS))
    return qa(
        r.choice(
            [
                "What is the capital of {}?",
                "Capital of {}?",
                "Tell me the capital of {}.",
                "Which city is the capital of {}?",
                "What's the capital of {}?",
                "Do you know the capital of {}?",
            ]
        ).format(c),
        f"The capital of {c} is {CAPITALS[c]}.",
    )


def vocabulary(r):
    """Opposites, French and Spanish words."""
    k = r.random()
    if k < 0.4:
        a, b = r.choice(OPPOSITES)
        if r.random() < 0.4 and b != "old":
            a, b = b, a
        return qa(
            r.choice(["What is the opposite of {}?", "Opposite of {}?", "Tell me the opposite of {}."]).format(a),
            f"The opposite of {a} is {b}.",
        )
    lang, d = r.choice([("French", WORDS_FR), ("Spanish", WORDS_ES)])
    w = r.choice(sorted(d))
    return qa(
        r.choice(["How do you say {w} in {l}?", "Translate {w} to {l}.", "What is {w} in {l}?", "{w} in {l}?"]).format(
            w=w, l=lang
        ),
        f"In {lang}, {w} is {d[w]}.",
    )


def memory(r):
    """Name, city, color and pet, told and asked over turns."""
    name, city, color, pet = r.choice(NAMES), r.choice(CITIES), r.choice(COLORS), r.choice(ANIMALS)
    if r.random() < 0.15:
        name = pseudo(r).capitalize()
    facts = [
        (
            ["My name is {}.", "Hi, I am {}.", "I'm {}.", "Hello, my name is {}.", "Call me {}.", "Hi! My name is {}"],
            "Nice to meet you, {}!",
            ["What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Say my name."],
            "Your name is {}.",
            name,
        ),
        (
            ["I live in {}.", "I am from {}."],
            "{} is a nice place.",
            ["Where do I live?", "Which city do I live in?", "Where am I from?"],
            "You live in {}.",
            city,
        ),
        (
            ["My favorite color is {}.", "I like the color {}."],
            "I will remember that you like {}.",
            ["What is my favorite color?", "Which color do I like?"],
            "Your favorite color is {}.",
            color,
        ),
        (
            ["I have {}.", "My pet is {}."],
            "{} is a good friend.",
            ["What pet do I have?", "What is my pet?"],
            "You have {}.",
            art(pet),
        ),
    ]
    told = [facts[0]] + [f for f in facts[1:] if r.random() < 0.3]
    r.shuffle(told)
    msgs = []
    for f in told:
        msgs += [
            dict(role="user", content=r.choice(f[0]).format(f[4])),
            dict(role="assistant", content=f[1].format(f[4][0].upper() + f[4][1:] if f[1][0] == "{" else f[4])),
        ]
        while r.random() < 0.3:
            msgs += r.choice([add, capital, greet, faq, count_list, copy_words])(r).messages
    r.shuffle(told)
    for f in told:
        msgs += [dict(role="user", content=r.choice(f[2])), dict(role="assistant", content=f[3].format(f[4]))]
    return Item(msgs)
