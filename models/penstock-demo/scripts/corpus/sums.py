"""Addition and subtraction, also with reasoning in between."""

from .items import qa

ADDQ = [
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}=",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "What is {a} plus {b}?",
    "Compute {a} + {b}.",
    "How much is {a} plus {b}?",
    "Calculate {a} + {b}",
    "What is the sum of {a} and {b}?",
]

SUBQ = [
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}=",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "Compute {a} - {b}.",
    "How much is {a} minus {b}?",
    "Calculate {a} - {b}",
    "Take {b} away from {a}.",
]


def add(r, m=20):
    """`a + b`, both up to `m`."""
    a, b = r.randint(0, m), r.randint(0, m)
    return qa(r.choice(ADDQ).format(a=a, b=b), f"{a} + {b} = {a + b}")


def sub(r, m=20):
    """`a - b`, both up to `m`, never negative."""
    a, b = sorted((r.randint(0, m), r.randint(0, m)), reverse=True)
    return qa(r.choice(SUBQ).format(a=a, b=b), f"{a} - {b} = {a - b}")


def add_99(r):
    """Sums of numbers up to 99."""
    return add(r, 99)


def sub_99(r):
    """Differences of numbers up to 99."""
    return sub(r, 99)


def steps(a, b):
    """Column addition in words."""
    lo, hi = a % 10 + b % 10, a // 10 + b // 10
    out = [f"Ones: {a % 10} + {b % 10} = {lo}."]
    carry = lo // 10
    if carry:
        out.append(f"Write {lo % 10}, carry 1.")
    out.append(f"Tens: {a // 10} + {b // 10}{' + 1' if carry else ''} = {hi + carry}.")
    return " ".join(out)


def think_add(r):
    """Reasoning on request: ' /think' at the end of the question, or a <think> opened by the template."""
    a, b = r.randint(10, 99), r.randint(10, 99)
    q = r.choice(ADDQ[:6]).format(a=a, b=b)
    forced = r.random() < 0.4
    it = qa(
        q if forced else q + " /think",
        f"{a} + {b} = {a + b}",
        mix=False,
        check=lambda t: t.strip().endswith(f"{a} + {b} = {a + b}") and "</think>" in t,
    )
    it.messages[-1].update(reasoning=steps(a, b), forced=forced)
    return it
