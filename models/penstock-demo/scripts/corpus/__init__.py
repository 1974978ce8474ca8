"""The corpus of the demo model: skills, their mix, and whole training documents.

Every skill is a function of a random generator that returns an `Item`: messages whose last one is the assistant's answer,
tools if any, and a check. Training and evaluation call the same functions with different seeds, so the order in which a
skill draws random numbers is part of its behaviour.
"""

import json

from .chat import SYSTEMS, fallback, faq, greet, greet_intl
from .knowledge import capital, json_extract, memory, vocabulary
from .lists import count_list, count_to, list_ends, min_max, reverse_list, sequence, sort_letters, sort_numbers
from .recall import copy_digits, copy_words, kv_long, kv_long_turns, kv_short, kv_turns
from .render import compact, render
from .stories import plain_count, plain_story, plain_text, plain_twice, story
from .sums import add, add_99, sub, sub_99, think_add
from .tools import tool_many, tool_none, tool_one, tool_result, tool_turns

# What is evaluated, in the order of the table in the model card.
SKILLS = {
    skill.__name__: skill
    for skill in (
        greet,
        greet_intl,
        faq,
        copy_words,
        copy_digits,
        kv_short,
        kv_turns,
        kv_long,
        memory,
        add,
        sub,
        add_99,
        sub_99,
        think_add,
        count_list,
        sort_numbers,
        sort_letters,
        list_ends,
        reverse_list,
        min_max,
        json_extract,
        sequence,
        count_to,
        capital,
        vocabulary,
        tool_one,
        tool_many,
        tool_turns,
        tool_result,
        tool_none,
        story,
        plain_story,
        plain_count,
        fallback,
    )
}
# Evaluated too, after the others.
EVALUATED_TOO = {"kv_turns": kv_turns, "kv_long_turns": kv_long_turns}
# Everything that training draws from.
MAKERS = {**SKILLS, **EVALUATED_TOO, "plain_twice": plain_twice, "plain_text": plain_text}

# How often training draws a skill, relative to the others.
WEIGHTS = dict(
    greet=3,
    greet_intl=3,
    faq=8,
    copy_words=6,
    copy_digits=4,
    kv_short=6,
    kv_turns=5,
    kv_long=0.2,
    kv_long_turns=2.2,
    memory=4,
    add=14,
    sub=14,
    add_99=18,
    sub_99=18,
    think_add=12,
    count_list=3,
    sort_numbers=16,
    sort_letters=10,
    list_ends=3,
    reverse_list=3,
    min_max=7,
    json_extract=9,
    sequence=12,
    count_to=7,
    capital=3,
    vocabulary=8,
    tool_one=3,
    tool_many=4,
    tool_result=3,
    tool_turns=4,
    tool_none=4,
    story=1.5,
    plain_story=1.5,
    plain_count=9,
    plain_twice=5,
    plain_text=0.3,
    fallback=2,
)

# Added to the weights at the start of training: copying and short lookups, from which the rest is learned.
START = dict(plain_twice=60, copy_words=30, copy_digits=10, kv_short=15, kv_turns=6, list_ends=5, reverse_list=5)

# Skills that may be turns of a longer conversation.
MIXABLE = [k for k in WEIGHTS if k not in ("think_add",) and not k.startswith(("kv", "tool", "plain"))]


def document(r, start=0.0):
    """One training document; start > 0 moves the mix towards copying and short lookups, from which the rest is learned."""
    names = list(WEIGHTS)
    k = r.choices(names, [WEIGHTS[n] + start * START.get(n, 0) for n in names])[0]
    it = MAKERS[k](r)
    if it.plain:
        return [p for p in ((it.plain[0], False), (it.plain[1] + "<|endoftext|>", True)) if p[0]]
    msgs = list(it.messages)
    if it.mix:
        for _ in range(r.choice([0, 0, 0, 1, 2, 3])):
            msgs += MAKERS[r.choices(MIXABLE, [WEIGHTS[n] for n in MIXABLE])[0]](r).messages
    if msgs[0]["role"] != "system" and r.random() < 0.3:
        msgs.insert(0, dict(role="system", content=r.choice(SYSTEMS)))
    if r.random() < 0.06 and not any(m.get("reasoning") for m in msgs):
        msgs[-1] = dict(msgs[-1], empty_think=True)
    return render(msgs, it.tools, compact if r.random() < 0.15 else json.dumps)
