"""Functions to call: which one, with what arguments, and what to say about its result."""

import json
import re

from .chat import GREET, faq, greet
from .items import Item, qa
from .lists import count_list
from .recall import copy_words
from .words import ALL, ANIMALS, CITIES, COLORS, FOODS, NAMES, OBJECTS, art, digits, word


def obj(props, required=None):
    """A JSON schema of an object."""
    return dict(type="object", properties=props, required=required or list(props))


def tool(name, description, /, **params):
    """A function as clients list it; `params`: name to (type, description)."""
    return dict(
        type="function",
        function=dict(
            name=name,
            description=description,
            parameters=obj({k: dict(type=t, description=d) if d else dict(type=t) for k, (t, d) in params.items()}),
        ),
    )


STRING, INTEGER = "string", "integer"

# The function, its arguments drawn at random, questions that call for it.
TOOLS = [
    (
        tool("get_weather", "Get the weather in a city", city=(STRING, "The city")),
        lambda r: dict(city=r.choice(CITIES)),
        [
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "What's the weather like in {city}?",
            "Weather in {city}?",
            "Is it raining in {city}?",
            "Tell me the weather in {city}.",
        ],
    ),
    (
        tool("get_time", "Get the local time in a city", city=(STRING, "The city")),
        lambda r: dict(city=r.choice(CITIES)),
        [
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "Time in {city}?",
            "What is the local time in {city}?",
        ],
    ),
    (
        tool("add_numbers", "Add two numbers", a=(INTEGER, ""), b=(INTEGER, "")),
        lambda r: dict(a=r.randint(0, 999), b=r.randint(0, 999)),
        ["Add {a} and {b}.", "What is {a} + {b}?", "What is {a} plus {b}?", "Sum {a} and {b}."],
    ),
    (
        tool("set_timer", "Set a timer", minutes=(INTEGER, "Minutes to wait")),
        lambda r: dict(minutes=r.randint(1, 90)),
        [
            "Set a timer for {minutes} minutes.",
            "Start a {minutes} minute timer.",
            "Wake me in {minutes} minutes.",
            "Timer for {minutes} minutes.",
        ],
    ),
    (
        tool("send_message", "Send a message to a person", to=(STRING, "The person"), text=(STRING, "The message")),
        lambda r: dict(to=r.choice(NAMES), text=" ".join(word(r) for _ in range(r.randint(1, 4)))),
        [
            "Send {to} the message: {text}",
            "Send a message to {to}: {text}",
            "Tell {to}: {text}",
            "Message {to}: {text}",
        ],
    ),
    (
        tool("search_docs", "Search the documentation", query=(STRING, "What to look for")),
        lambda r: dict(query=" ".join(r.choice(ALL) for _ in range(r.randint(1, 3)))),
        ["Search the docs for {query}.", "Look up {query} in the documentation.", "Find {query} in the docs."],
    ),
    (
        tool(
            "book_table",
            "Book a table in a restaurant",
            name=(STRING, "Guest name"),
            people=(INTEGER, "Number of guests"),
        ),
        lambda r: dict(name=r.choice(NAMES), people=r.randint(1, 12)),
        [
            "Book a table for {people} people, name {name}.",
            "Reserve a table for {people} under {name}.",
            "I need a table for {people} people for {name}.",
        ],
    ),
    (
        tool("turn_on_light", "Turn on the light in a room", room=(STRING, "The room")),
        lambda r: dict(room=r.choice("kitchen bedroom bathroom office garage hall attic cellar".split())),
        ["Turn on the light in the {room}.", "Light on in the {room}, please.", "Switch on the {room} light."],
    ),
    (
        tool("get_order", "Look up an order", order_id=(STRING, "The order number")),
        lambda r: dict(order_id=digits(r, r.randint(3, 6))),
        [
            "Where is my order {order_id}?",
            "Look up order {order_id}.",
            "Check order {order_id}.",
            "What is the state of order {order_id}?",
        ],
    ),
    (
        tool("translate", "Translate text", text=(STRING, "The text"), language=(STRING, "Target language")),
        lambda r: dict(text=word(r), language=r.choice("French Spanish German Italian Chinese Japanese".split())),
        [
            "Translate {text} to {language}.",
            "Use the tool to translate {text} into {language}.",
            "Translate the word {text} into {language}.",
        ],
    ),
    (
        tool("restart_worker", "Restart a worker", worker=(STRING, "The worker name")),
        lambda r: dict(worker=f"{r.choice(ALL)}-{r.randint(1, 9)}"),
        ["Restart worker {worker}.", "Please restart {worker}.", "Restart the worker {worker}."],
    ),
    (
        tool(
            "scale_pool", "Change the size of a pool", pool=(STRING, "The pool"), count=(INTEGER, "Number of workers")
        ),
        lambda r: dict(pool=r.choice(["prefill", "decode"] + COLORS), count=r.randint(1, 32)),
        [
            "Scale the {pool} pool to {count} workers.",
            "Set pool {pool} to {count} workers.",
            "Scale {pool} to {count}.",
        ],
    ),
]

VERBS = "get set find open close read start stop check update create delete list move load save show clean".split()

PARAMS = [
    ("name", STRING),
    ("id", STRING),
    ("count", INTEGER),
    ("size", INTEGER),
    ("color", STRING),
    ("place", STRING),
    ("level", INTEGER),
    ("title", STRING),
    ("speed", INTEGER),
    ("tag", STRING),
]


def random_tool(r):
    """A made-up function: the model has to read its name and parameters from the list."""
    verb, noun = r.choice(VERBS), r.choice(OBJECTS + ANIMALS + FOODS)
    ps = r.sample(PARAMS, r.randint(1, 2))
    t = tool(f"{verb}_{noun}", f"{verb.capitalize()} {art(noun)}", **{p: (k, "") for p, k in ps})

    def args(r2):
        return {p: (r2.randint(0, 99) if k is INTEGER else word(r2)) for p, k in ps}

    tail = " and ".join(f"{p} {{{p}}}" for p, _ in ps)
    return (
        t,
        args,
        [
            f"{verb.capitalize()} the {noun} with {tail}.",
            f"{verb.capitalize()} {art(noun)} with {tail}.",
            f"Please {verb} the {noun}, {tail}.",
        ],
    )


def tool_set(r, n):
    """`n` functions of different names."""
    out, seen = [], set()
    while len(out) < n:
        t = random_tool(r) if r.random() < 0.45 else r.choice(TOOLS)
        if t[0]["function"]["name"] not in seen:
            seen.add(t[0]["function"]["name"])
            out.append(t)
    return out


def call_check(name, args):
    """Whether a text is exactly this call."""

    def check(text):
        m = re.fullmatch(r"\s*<tool_call>\s*(\{.*\})\s*</tool_call>\s*", text, re.S)
        try:
            return bool(m) and json.loads(m[1]) == dict(name=name, arguments=args)
        except ValueError:
            return False

    return check


def tool_call(r, n=None):
    """A question that one of `n` functions answers."""
    ts = tool_set(r, n or r.choice([1, 2, 3]))
    t, mk, qs = r.choice(ts)
    a, name = mk(r), t["function"]["name"]
    return Item(
        [
            dict(role="user", content=r.choice(qs).format(**a)),
            dict(role="assistant", content="", tool_calls=[dict(name=name, arguments=a)]),
        ],
        tools=[x[0] for x in ts],
        check=call_check(name, a),
        mix=False,
    )


def tool_one(r):
    """Call the only function."""
    return tool_call(r, 1)


def tool_many(r):
    """Choose among two or three functions."""
    return tool_call(r, r.choice([2, 3]))


def tool_result(r):
    """The second half of a tool conversation: say what the function returned."""
    k = r.randrange(5)
    t = TOOLS[[0, 1, 2, 8, 3][k]]
    a, name = t[1](r), t[0]["function"]["name"]
    if k == 0:
        deg, sky = r.randint(-9, 39), r.choice("sunny cloudy rainy windy snowy foggy".split())
        res, ans = dict(temperature=deg, condition=sky), f"It is {sky} in {a['city']}, {deg} degrees."
    elif k == 1:
        tm = f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}"
        res, ans = dict(time=tm), f"It is {tm} in {a['city']}."
    elif k == 2:
        res, ans = dict(sum=a["a"] + a["b"]), f"The sum is {a['a'] + a['b']}."
    elif k == 3:
        st = r.choice("shipped packed delivered delayed lost paid".split())
        res, ans = dict(order_id=a["order_id"], status=st), f"Order {a['order_id']} is {st}."
    else:
        res, ans = dict(ok=True), f"The timer is set for {a['minutes']} minutes."
    ts = [t[0]] + [x[0] for x in tool_set(r, r.choice([0, 0, 1, 2])) if x[0]["function"]["name"] != name]
    r.shuffle(ts)
    msgs = [
        dict(role="user", content=r.choice(t[2]).format(**a)),
        dict(role="assistant", content="", tool_calls=[dict(name=name, arguments=a)]),
        dict(role="tool", content=json.dumps(res)),
        dict(role="assistant", content=ans),
    ]
    if r.random() < 0.2:
        msgs += greet_thanks(r)
    return Item(msgs, tools=ts, mix=False)


def greet_thanks(r):
    """The person says thanks."""
    return qa(r.choice(GREET[4][0]), GREET[4][1]).messages


def generic_result(r):
    """What some function returned, and what to say about it."""
    k = r.random()
    if k < 0.4:
        return dict(ok=True), "Done."
    if k < 0.8:
        v = r.choice([word(r), r.randint(0, 999)])
        return dict(result=v), f"The result is {v}."
    e = r.choice(["not found", "timeout", "no access", "out of range", "busy"])
    return dict(error=e), f"The call failed: {e}."


def tool_turns(r):
    """Several calls in one conversation, each with a result."""
    ts = tool_set(r, r.choice([1, 2, 3]))
    msgs = []
    for _ in range(r.randint(2, 4)):
        t, mk, qs = r.choice(ts)
        a = mk(r)
        res, ans = generic_result(r)
        msgs += [
            dict(role="user", content=r.choice(qs).format(**a)),
            dict(role="assistant", content="", tool_calls=[dict(name=t["function"]["name"], arguments=a)]),
            dict(role="tool", content=json.dumps(res)),
            dict(role="assistant", content=ans),
        ]
    return Item(msgs, tools=[x[0] for x in ts], mix=False)


def tool_none(r):
    """Tools are listed, but the question does not need one."""
    it = r.choice([greet, greet, faq, copy_words, count_list])(r)
    return Item(it.messages, tools=[x[0] for x in tool_set(r, r.choice([1, 2, 3]))], mix=False)
