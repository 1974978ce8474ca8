"""An item: one conversation or text, its answer, and how an answer is judged."""


class Item:
    """messages (the last is the answer), optional tools, check(text) -> bool, mixable into longer conversations."""

    def __init__(self, messages, tools=None, check=None, mix=True, plain=None):
        self.messages, self.tools, self.mix, self.plain = messages, tools, mix, plain
        answer = messages[-1] if messages else None
        self.check = check or (lambda text: text.strip() == answer["content"].strip())


def qa(q, a, check=None, mix=True):
    """One question and its answer."""
    return Item([dict(role="user", content=q), dict(role="assistant", content=a)], check=check, mix=mix)


def style(r, q):
    """Small surface changes that must not change the answer."""
    x = r.random()
    if x < 0.06:
        q = q[0].lower() + q[1:]
    elif x < 0.12:
        q = "Please " + (q[0].lower() + q[1:] if not q.startswith("I ") else q) if q[0].isupper() else q
    elif x < 0.16:
        q = q.rstrip(".")
    elif x < 0.19:
        q = "Hey, " + q[0].lower() + q[1:] if q[0].isupper() else q
    return q
